"""All that may be replaced in graphs of inference, in the order in which it is."""

from tilestream.plan.depthwise import DEPTHWISE_CONVOLUTIONS
from tilestream.plan.interaction import INTERACTIONS
from tilestream.plan.patches import PATCHES
from tilestream.plan.replacement import Replacement
from tilestream.plan.squeeze import GATES

REPLACEMENTS: tuple[Replacement, ...] = (INTERACTIONS, PATCHES, DEPTHWISE_CONVOLUTIONS, GATES)
