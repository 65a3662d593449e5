"""What an interaction moves, issues and is predicted to take: our kernels, and the same by a library's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor, fx

from tilestream.devices import Device
from tilestream.graph.costs.work import size
from tilestream.graph.interaction.op import INTERACTION, INTERACTION_BACKWARD, width
from tilestream.graph.interaction.place import place
from tilestream.graph.interaction.sites import Interaction, find_interactions
from tilestream.graph.nodes import arguments, tensor_of
from tilestream.graph.sizes import hint
from tilestream.kernels.costs import Amount, Counts
from tilestream.options import Options
from tilestream.plan.replacement import Replacement, dram, launch
from tilestream.plan.values import Moved
from tilestream.simulator.library import Stream

TARGETS = (INTERACTION, INTERACTION_BACKWARD)
WARP = 32
COPY, PRODUCT, PICK, SCATTER, SAMPLE = 14, 16, 60, 12, 100
"""Issue slots of a warp: 16 bytes a lane on their way; one m16n8k16, which the tensor cores take so many cycles for;
256 products picked and written; 32 gradients scattered; a sample's loop. Counted in machine code; not measured."""
LOOKUP_S = 1.65e-6
"""From asking for rows, or for the index that names them, to having them, with the DRAM under load."""
LOOKUP = 1.43
"""What bytes of looked-up rows cost beside bytes in order: 232 MB of rows of 256 bytes came at 3.0 TB/s (H200, batch
32,768: 91.5 us forward and 143 us backward in DLRM's training step)."""
SQUARES = 3
"""Kernels of the library that go over all products of a sample: it makes, picks and joins them."""


@dataclass(frozen=True)
class Sizes:
    """Of an interaction: ``batch`` samples of ``vectors`` of ``features`` elements, of which ``looked_up`` come from
    tables; ``pairs`` products; ``head`` as the operator's; ``element`` bytes."""

    batch: int
    vectors: int
    features: int
    pairs: int
    head: int
    looked_up: int
    element: int = 2

    @property
    def rows_bytes(self) -> int:
        """Of all vectors of all samples."""
        return self.batch * self.vectors * self.features * self.element

    @property
    def index_bytes(self) -> int:
        return 8 * self.batch * self.looked_up

    @property
    def result_bytes(self) -> int:
        return self.batch * width(self.features, self.pairs, self.head) * self.element

    @property
    def forward_bytes(self) -> int:
        """Rows read once, results written once: what no kernel can do without where tables exceed the L2."""
        return self.rows_bytes + self.index_bytes + self.result_bytes

    @property
    def backward_bytes(self) -> int:
        """Rows read once more, since none is saved; gradients of products read, those of rows written."""
        return 2 * self.rows_bytes + self.index_bytes + self.batch * self.pairs * self.element

    def slots(self, forward: bool) -> float:
        """Lane operations that the kernel of a pass issues."""
        blocks, deep = ceil(self.vectors / 16), ceil(self.features / 16)
        copies = COPY * ceil(self.vectors * deep * 2 / WARP)
        if forward:
            others = PRODUCT * deep * blocks * (blocks + 1) + PICK * ceil(self.pairs / 256)
        else:
            others = PRODUCT * 2 * deep * blocks * blocks + SCATTER * ceil(self.pairs / WARP) + copies
        return float(self.batch * WARP * (SAMPLE + copies + others))


@dataclass(frozen=True)
class Kind:
    """All that decides how long an interaction takes. ``tables``: rows of each vector's table, 0 for rows that are
    there."""

    sizes: Sizes
    tables: tuple[int, ...]
    dtype: str
    training: bool


def kind_of(site: Interaction) -> Kind:
    """What decides how long a site of a graph takes."""
    made = site.picked.meta["val"]
    tables = tuple(0 if v.index is None else hint(v.rows.meta["val"].shape[0]) for v in site.vectors)
    looked_up = sum(n > 0 for n in tables)
    sizes = Sizes(hint(made.shape[0]), len(tables), site.features, hint(made.shape[1]), site.head, looked_up)
    return Kind(sizes, tables, str(made.dtype), site.gradient is not None)


def sizes_of(
    sources: Sequence[Tensor], indices: Sequence[Tensor | None], first: Tensor, head: int, batch: int
) -> Sizes:
    """Of an operator's operands, which may be fake."""
    looked_up = sum(i is not None for i in indices)
    features, element = hint(sources[0].shape[1]), sources[0].element_size()
    return Sizes(batch, len(sources), features, hint(first.shape[0]), head, looked_up, element)


def of_node(node: fx.Node) -> Sizes:
    """Of a call of one of ``TARGETS`` in a graph with fake values."""
    sources, indices, first, _, last = arguments(node)
    made, forward = node.meta["val"], node.target is INTERACTION
    head = last if forward else -1
    fakes, names = [s.meta["val"] for s in sources], [i.meta["val"] if i else None for i in indices]
    return sizes_of(fakes, names, first.meta["val"], head, hint(made.shape[0 if forward else 1]))


def moved_by(node: fx.Node) -> Moved:
    """Distinct bytes that a call reads and writes, by value: of a table, the rows that are looked up."""
    sizes = of_node(node)
    row = sizes.batch * sizes.features * sizes.element
    sources, taken = arguments(node)[0], {}
    for operand in node.all_input_nodes:
        fake = tensor_of(operand)
        held, times = size(fake) * fake.element_size(), sources.count(operand)
        taken[operand.name] = min(held, row * times) if times else held
    made = node.meta["val"]
    return Moved(tuple(taken.items()), ((node.name, size(made) * made.element_size()),))


def work_of(node: fx.Node) -> Stream:
    """What the simulator runs for a call."""
    sizes, forward = of_node(node), node.target is INTERACTION
    elements = sizes.rows_bytes / sizes.element
    read = sizes.rows_bytes + sizes.index_bytes + (0 if forward else sizes.batch * sizes.pairs * sizes.element)
    return Stream(elements, slots=sizes.slots(forward), touched=float(read))


def ours(sizes: Sizes, training: bool, device: Device) -> Counts:
    """Our kernels, forward or both: memory or issue, and a launch each."""
    apart = (LOOKUP - 1) * sizes.rows_bytes * sizes.looked_up / sizes.vectors
    passes = [("forward", sizes.forward_bytes + apart, sizes.slots(forward=True))]
    if training:
        passes.append(("backward", sizes.backward_bytes + apart, sizes.slots(forward=False)))
    start = Amount("launch", device.launch_s + device.ramp_s + 2 * LOOKUP_S)  # an index, and the rows that it names
    made = []
    for name, moved, slots in passes:
        streams = (dram(moved, device), Amount("lanes", slots, device.simt_flops))
        made.append(Counts(name, (Counts("streams", streams, max), start)))
    return Counts("interaction", tuple(made))


def library(sizes: Sizes, training: bool, device: Device) -> Counts:
    """The library's kernels if memory alone bounds them: rows gathered, products, picked and joined.

    Backward: products put back, twice multiplied by the rows that were saved, and added.
    """
    square = sizes.batch * sizes.vectors**2 * sizes.element
    moved = 3 * sizes.rows_bytes + SQUARES * square + sizes.index_bytes + sizes.result_bytes
    kernels = 3
    if training:
        moved += 2 * sizes.rows_bytes + 4 * sizes.rows_bytes + 2 * SQUARES * square
        kernels += 5
    return Counts("kernels of a library", (dram(moved, device), launch(device, kernels)))


def _in_graphs(joint: bool) -> Replacement:
    def sites(graph: fx.Graph, options: Options) -> Sequence[Interaction]:
        return find_interactions(graph, joint) if options.interactions else ()

    return Replacement(
        "interaction",
        "an interaction of lookups goes to Inductor",
        sites,
        lambda site, _: [kind_of(site)],
        lambda kind, device: ours(kind.sizes, kind.training, device),
        lambda kind, device: library(kind.sizes, kind.training, device),
        lambda owner, site, _: place(owner, site),
    )


INTERACTIONS, JOINT_INTERACTIONS = _in_graphs(joint=False), _in_graphs(joint=True)
"""Interactions of lookups: of inference graphs, and of joint ones before they are cut."""
