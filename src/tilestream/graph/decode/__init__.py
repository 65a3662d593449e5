"""A decode step of a whole model: found in a graph, one operator in its place."""

from tilestream.graph.decode.op import STEP
from tilestream.graph.decode.place import place
from tilestream.graph.decode.site import Site, site_of

__all__ = ["STEP", "Site", "place", "site_of"]
