"""Interactions of a sample's vectors, as DLRM has them: found in a graph, and replaced by an operator of ours."""

from tilestream.graph.interaction.op import INTERACTION, INTERACTION_BACKWARD
from tilestream.graph.interaction.place import place, unpadded
from tilestream.graph.interaction.sites import Interaction, find_interactions

__all__ = ["INTERACTION", "INTERACTION_BACKWARD", "Interaction", "find_interactions", "place", "unpadded"]
