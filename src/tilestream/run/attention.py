"""A library's attention: whether it runs, and kernels that take its place where they win."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from tilestream.announce import announced
from tilestream.graph.lying import lie_alike
from tilestream.graph.real import real
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.shared_keys import MASKS, given_to, is_attention, take_over
from tilestream.graph.settled import settle
from tilestream.options import Options
from tilestream.plan.chooser import alternative, choose
from tilestream.run import prepare
from tilestream.run.made_up import random_tensor
from tilestream.run.target import Target
from tilestream.run.timer import Timer, Trial

log = logging.getLogger(__name__)
_ran: dict[str, bool] = {}


def runs_here(called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a library's attention takes arguments like these fake ones: it is called with random values, once a
    shape. PyTorch chose it for other shapes, and its own limits are not told."""
    fakes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if any(x.device.type != "cuda" for x in fakes) or torch.cuda.is_current_stream_capturing():
        return True
    shapes = [(tuple(x.shape), tuple(x.stride()), x.dtype, x.device) for x in fakes]
    key = str((called, shapes, [x for x in (*args, *kwargs.values()) if not isinstance(x, torch.Tensor)]))
    if key not in _ran:
        try:
            with real(fakes[0].device):
                made = tree_map_only(torch.Tensor, random_tensor, (list(args), dict(kwargs)))
                called(*made[0], **made[1])
                torch.cuda.synchronize()
            _ran[key] = True
        except RuntimeError as failure:
            log.info("keys stay repeated: %s", failure)
            _ran[key] = False
    return _ran[key]


@dataclass(frozen=True)
class Kind:
    """All that decides how long an attention takes: the library's operator, sizes and strides of what it reads."""

    operator: str
    layouts: tuple[tuple[tuple[int, ...], ...], ...]
    dtype: str
    causal: bool
    scale: float | None


def kind_of(node: fx.Node) -> Kind:
    """What an attention is, whose sizes are known."""
    given = given_to(node)
    fakes = [given[name].meta["val"] for name in _operands(given)]
    layouts = tuple((tuple(f.shape), tuple(f.stride())) for f in fakes)
    causal, scale = bool(given.get("is_causal")), given.get("scale")
    return Kind(str(node.target), layouts, str(fakes[0].dtype), causal, scale)


def _operands(given: Mapping[str, Any]) -> list[str]:
    """Names of an attention's tensors: query, key, value, and a mask where it has one."""
    return [name for name in ("query", "key", "value", *MASKS) if isinstance(given.get(name), fx.Node)]


@dataclass(frozen=True)
class Alternative:
    """Another kernel for a library's attention.

    Args:
        name: of the choice.
        instead: what becomes of an attention for which there is an exception of ours, for its announcement.
        fits: whether the kernel can do what a node does, whose sizes are then known.
        ours: the kernel, in the place of a node, of its query, key, value and mask, if it has one. Its first argument
            calls an operator, or puts it into the node's graph: then operands and result are nodes.
        on_reference: whether the reference machine, which was asked for, takes it untimed.
    """

    name: str
    instead: str
    fits: Callable[[fx.Node], bool]
    ours: Callable[..., Any]
    on_reference: bool = False

    def replace(self, node: fx.Node) -> bool:
        """Put it in the place of an attention; whether it was: the result must lie as it lay before, since views of it
        are taken."""
        given, last = given_to(node), node.prev
        with node.graph.inserting_before(node):
            made = self.ours(partial(call, node), node, *(given[name] for name in _operands(given)))
        if not lie_alike(made.meta["val"], node.meta["val"][0]):
            while node.prev is not last:
                node.graph.erase_node(node.prev)
            return False
        take_over(node, made)
        return True


def fake_of(x: Tensor | fx.Node) -> Tensor:
    """An operand of ``Alternative.ours``, or the value of a node that is one."""
    return x if isinstance(x, Tensor) else x.meta["val"]


def _called(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def attention_trial(node: fx.Node, ours: Callable[..., Any]) -> Trial:
    """An attention as a graph has it and ``ours``, on random tensors like its operands; held to what it means."""
    given = given_to(node)
    names = _operands(given)

    def make() -> list[Tensor]:
        return [random_tensor(given[name].meta["val"]) for name in names]

    def library(*values: Tensor) -> Sequence[Tensor]:
        kernel: Any = node.target
        return kernel(**given | dict(zip(names, values, strict=True)))[:1]

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        named = {"is_causal": bool(given.get("is_causal")), "scale": given.get("scale")}
        shared = query.shape[1] != key.shape[1]
        return [torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=shared, **named)]

    return Trial.of_two("attention", make, lambda *values: [ours(_called, node, *values)], library, plain)


def replace_attention(graph: fx.GraphModule, by: Alternative, options: Options, target: Target) -> int:
    """Put ``by`` in the place of every attention where it wins; how many were.

    An exception of ours costs the attention, and is announced.

    Args:
        graph: functional ATen of an inference graph, with fake tensors of every node in its meta; changed in place.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    forced = by.on_reference and target.kind == "reference"
    if not options.attention or not (prepare.measures(options, target) or forced):
        return 0
    made = 0
    for node in [n for n in graph.graph.nodes if is_attention(n) and by.fits(n)]:
        with announced(by.instead, options.fallback), prepare.kernels_kept(options, target):
            asked = alternative(by.name, kind_of(node), target.hardware, forced=forced)
            timer = None if forced else Timer(attention_trial(node, by.ours), target)
            made += choose(asked, options, timer).wins and by.replace(node)
    if made:
        settle(graph)
    return made
