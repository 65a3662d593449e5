"""Which weight gradients of a backward graph could share a launch, and what that is predicted to take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, fx

from tilestream.devices import Device
from tilestream.graph.convexity import Groups, successors
from tilestream.graph.gradients import GradientSite, aliases, find_gradients, together
from tilestream.graph.interaction.place import longer
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline
from tilestream.ir.serialise import pipeline_to_json
from tilestream.kernels.gradients.cost import cost
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import Question
from tilestream.plan.gradients import STRATEGY, Gradient, library, weight_gradients

BULK_BYTES = 16


@dataclass(frozen=True)
class GradientLaunch:
    """Sites that share a launch; ``layers`` are theirs in order, of widths that bulk copies can address."""

    name: str
    sites: tuple[GradientSite, ...]
    layers: tuple[Gradient, ...]

    @property
    def rows(self) -> int:
        return self.sites[0].rows

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operators of all sites."""
        return tuple(node for site in self.sites for node in site.nodes)

    @property
    def operands(self) -> dict[str, fx.Node]:
        """Tensors of the pipeline and the nodes that they are, each once."""
        found: dict[str, fx.Node] = {}
        for site, layer in zip(self.sites, self.layers, strict=True):
            found |= {layer.gradient: site.gradient, layer.input: site.input}
        return found

    @property
    def results(self) -> dict[str, fx.Node]:
        """Results of the pipeline, in order, and the nodes that they stand for."""
        found: dict[str, fx.Node] = {}
        for site, layer in zip(self.sites, self.layers, strict=True):
            found[layer.weight] = site.product
            if site.total is not None:
                found[layer.bias] = site.total
        return found

    @property
    def current(self) -> GradientLaunch:
        """The same launch with the operands that its products have by now."""
        return replace(self, sites=tuple(site.current for site in self.sites))

    def whole(self, node: fx.Node) -> tuple[fx.Node, int]:
        """What a launch takes for an operand, and how many columns of zeros behind it, so that bulk copies can address
        it: itself, or the matrix that it is cut from."""
        columns = int(node.meta["val"].shape[1])
        wanted = padded(columns, self.layers[0].dtype)
        whole = longer(node) if wanted != columns else None  # of gradients of its other columns nobody takes any
        if whole is not None and whole.meta["val"].shape[1] == wanted:
            return whole, 0
        return node, wanted - columns

    def widened(self, node: fx.Node) -> Tensor:
        """An operand as a launch takes it."""
        whole, more = self.whole(node)
        fake = whole.meta["val"]
        return fake.new_empty((fake.shape[0], fake.shape[1] + more)) if more else fake

    def pipeline(self, hardware: Device) -> Pipeline:
        """The stationary sums of all layers."""
        return weight_gradients("gradients", self.layers, hardware)


def least_rows(options: Options) -> int:
    """Rows from which on gradients may be streamed; any where the reference machine was asked for."""
    return 1 if options.target == "reference" else margins.GRADIENT_ROWS


def gradient_sites(graph: fx.Graph, hardware: Device, least: int) -> list[GradientSite]:
    """Gradients of at least so many rows each of whose blocks has an SM: wider layers are the library's."""
    return [s for s in find_gradients(graph) if s.rows >= least and _blocks(s) <= hardware.sms]


def apart(sites: Sequence[GradientSite]) -> dict[str, str]:
    """Names of the sites' operators, and why they are in no region of rows."""
    return {node.name: "sums over rows" for site in sites for node in site.nodes}


def gradient_launches(
    sites: Sequence[GradientSite], hardware: Device, regions: Sequence[Sequence[fx.Node]]
) -> list[GradientLaunch]:
    """The launches of these sites: of each group that is made at once, as many as its blocks need; none of a site that
    needs more SMs than there are.

    No launch waits for itself or for another that waits for it: sites that would make that so are kept apart.

    Args:
        regions: nodes that run at once.
    """
    made: list[GradientLaunch] = []
    sites = [site for site in sites if _blocks(site) <= hardware.sms]
    if not sites:
        return []
    joined, numbers = _contracted(sites, regions), {node: n for n, nodes in enumerate(regions) for node in nodes}
    for group in together([_convex(site, joined) for site in sites], lambda node: _origin(node, numbers)):
        part: list[GradientSite] = []
        for site in _in_order(group):
            fits = sum(map(_blocks, [*part, site])) <= hardware.sms
            if part and not (fits and joined.merge(part[0].product, site.product)):
                made.append(_launch(len(made), part))
                part = []
            part.append(site)
        made.append(_launch(len(made), part))
    return made


def question(launch: GradientLaunch, hardware: Device, forced: bool = False) -> Question:
    """Whether a launch runs as stationary sums or by the library's kernels.

    Predicted by ``library``, not by the event loop: the latter's kernels of such sums are too fast (three layers 64
    wide take Inductor 109 us at 262,144 rows, measured), and a GPU, where both are timed, would choose otherwise.

    Args:
        forced: the library is no alternative.

    Raises:
        PlanError: from ``weight_gradients``.
    """
    pipeline = launch.pipeline(hardware)

    def propose() -> tuple[Candidate, ...]:
        ours_us = cost(pipeline, launch.rows, hardware).seconds * 1e6
        library_us = library(launch.layers, launch.rows, hardware).us
        return Candidate(STRATEGY, pipeline, ours_us), Candidate(FALLBACK, None, library_us)

    def decides() -> list[object]:
        return [pipeline_to_json(pipeline, sources=False), launch.rows]

    return Question("gradients", launch.rows, hardware, decides, propose, forced)


def padded(columns: int, dtype: str) -> int:
    """The columns of rows that bulk copies can address."""
    step = BULK_BYTES // DTYPE_BYTES[dtype]
    return -(-columns // step) * step


def _contracted(sites: Sequence[GradientSite], regions: Sequence[Sequence[fx.Node]]) -> Groups[fx.Node]:
    """The sites' graph, in which nodes that run at once are one; sites may be joined further."""
    nodes = list(sites[0].product.graph.nodes)
    may_join = [node for some in (*(site.nodes for site in sites), *regions) for node in some]
    joined = Groups(successors(nodes), dict.fromkeys(may_join, frozenset()))
    joined.hold(regions)
    return joined


def _convex(site: GradientSite, joined: Groups[fx.Node]) -> GradientSite:
    """The site without its sum where one is computed from the other: no launch could make both."""
    if site.total is None or joined.merge(site.product, site.total):
        return site
    return replace(site, total=None, bias_dtype=site.dtype)


def _origin(node: fx.Node, numbers: Mapping[fx.Node, int]) -> fx.Node | int:
    """The region that makes a gradient, or that reads it and so keeps it until then; the gradient where none does."""
    views = aliases(node)
    nearest = (views[0], *(user for view in views for user in view.users))
    return next((numbers[each] for each in nearest if each in numbers), views[0])


def _blocks(site: GradientSite) -> int:
    return prod(Gradient("", "", "", site.out, site.k).parts)


def _in_order(sites: Sequence[GradientSite]) -> list[GradientSite]:
    """Sites by their sizes, and those of others with the same operands: launches of equal layers are equal, in whatever
    order a graph has them."""

    def sizes(site: GradientSite) -> tuple[Hashable, ...]:
        return site.out, site.k, site.total is None, site.weight_dtype, site.bias_dtype

    def shares(site: GradientSite) -> list[list[tuple[Hashable, ...]]]:
        same = ([o for o in sites if o.gradient is site.gradient], [o for o in sites if o.input is site.input])
        return [sorted(map(sizes, each), key=str) for each in same]

    return sorted(sites, key=lambda site: str((sizes(site), shares(site))))


def _launch(number: int, sites: Sequence[GradientSite]) -> GradientLaunch:
    """Operands are numbered, so that launches of equal layers are equal."""
    layers = []
    names: dict[fx.Node, str] = {}
    for n, s in enumerate(sites):
        bias = f"db{n}" if s.total is not None else ""
        out, k = (padded(size, s.dtype) for size in (s.out, s.k))
        dy, x = (names.setdefault(node, f"t{len(names)}") for node in (s.gradient, s.input))
        layers.append(Gradient(dy, x, f"dw{n}", out, k, bias, s.dtype, s.weight_dtype, s.bias_dtype, s.source))
    return GradientLaunch(f"gradients{number}", tuple(sites), tuple(layers))
