"""The options of ``torch.compile(model, backend="tilestream", options={...})``."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tilestream.errors import OptionError

Target = Literal["auto", "cuda", "reference"]
Strategy = Literal["auto", "bulk", "vertical", "spatial", "shared"]
Effort = Literal["model", "measured", "exhaustive"]
Convolutions = Literal["auto", "off", "lanes", "bulk"]


@dataclass(frozen=True)
class Options:
    """How regions are planned and run. Every field is documented in ``docs/options.md``.

    Args:
        target: what runs the pipelines. ``auto``: the GPU where it is an sm_90a one, else Inductor.
        strategy: force one strategy, or let cost and measurement choose.
        measure: on a GPU, time the candidates against Inductor before choosing.
        cache: keep plans and kernels on disk, so that a second process starts warm.
        cache_dir: where; ``None`` means ``$TILESTREAM_CACHE_DIR``, else ``~/.cache/tilestream``.
        device: plan for a device of this name instead of the one present.
        queue_depth: tiles in every L2 queue (even, at least 2); ``None`` lets the planner choose.
        any_order: partial results may be added in any order where torch's own flag for deterministic algorithms allows
            it: faster on few rows, and the last bits of a result vary from call to call.
        constant_weights: the user's word that weights of inference graphs do not change, so that those that lie as no
            kernel reads them, as Hugging Face's GPT-2's, are copied once and not at every call.
        cluster_middle: kernels for at most 64 rows that hand the middle over through the shared memory of a cluster are
            candidates too, where candidates are timed and no norm stands in front.
        effort: of the search for a region's kernel: the best by prediction; the best few timed; or, of feed-forward
            blocks on few rows, all that fit, within a minute a region.
        projections: single layers, as projections of queries, keys and values, are regions too: products of one input
            as one kernel, with a norm in front and a residual behind. On many rows norms stay outside, and a product
            with nothing beside it is a library's.
        interactions: lookups and the products of their rows pair by pair, as DLRM has them, as one kernel each way
            where that is faster.
        attention: attention of a token a sequence over keys that several heads share as a kernel of ours, and flash
            attention in the place of cuDNN's, each where that is faster, in inference graphs with regions; attention
            over a mask of pairs as a kernel of ours, where the graph as a whole is faster with it.
        decode_step: a decode step of 1 to 32 sequences over a static cache, from the embedding to the logits, as one
            kernel, where that is faster than the graph with its regions and Inductor's own.
        early_launch: kernels of inference graphs start, and load weights, while the kernel in front of them still
            runs.
        float32_parts: linear layers of float32, which torch's default keeps off the tensor cores in tf32, are computed
            there in inference by products of bf16 parts, as exactly.
        keep_lists: keep sorted lists of edges from call to call, where torch counts no change of an argument in between
            and no CUDA graph is captured: for who writes to lists by torch's operators alone. Those of constant buffers
            (``constant_weights``) are always kept.
        convolutions: take convolutions of channels-last tensors, with what follows them, into regions, whose kernels
            copy pixels in bulk by the im2col mode of bulk copies (where it cannot, lane by lane), or all lane by lane,
            which is slower. ``auto``: in bulk. Inference alone.
        fallback: hand what is not taken to Inductor; ``False`` raises the reason instead.

    Raises:
        OptionError: a value is outside its range, or contradicts another option.
    """

    target: Target = "auto"
    strategy: Strategy = "auto"
    measure: bool = True
    cache: bool = True
    cache_dir: Path | None = None
    device: str | None = None
    queue_depth: int | None = None
    any_order: bool = False
    constant_weights: bool = False
    cluster_middle: bool = True
    effort: Effort = "measured"
    projections: bool = True
    interactions: bool = True
    attention: bool = True
    decode_step: bool = True
    early_launch: bool = True
    float32_parts: bool = True
    keep_lists: bool = False
    convolutions: Convolutions = "auto"
    fallback: bool = True

    def __post_init__(self) -> None:
        _one_of("target", self.target, get_args(Target))
        _one_of("strategy", self.strategy, get_args(Strategy))
        _one_of("effort", self.effort, get_args(Effort))
        _one_of("convolutions", self.convolutions, get_args(Convolutions))
        flags = (
            "measure",
            "cache",
            "any_order",
            "constant_weights",
            "cluster_middle",
            "projections",
            "interactions",
            "attention",
            "decode_step",
            "early_launch",
            "float32_parts",
            "keep_lists",
            "fallback",
        )
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"option {name}={getattr(self, name)!r} is not a bool", f"use {name}=True or False")
        if self.device is not None and not isinstance(self.device, str):
            raise OptionError(f"option device={self.device!r} is not a name", "use the name of a device, as 'h200'")
        if isinstance(self.cache_dir, str):
            object.__setattr__(self, "cache_dir", Path(self.cache_dir).expanduser())
        elif self.cache_dir is not None and not isinstance(self.cache_dir, Path):
            raise OptionError(f"option cache_dir={self.cache_dir!r} is not a path", "use a str or a pathlib.Path")
        self._check_depth()
        if self.cache_dir is not None and not self.cache:
            raise OptionError("cache=False contradicts cache_dir", "leave one of the two out")

    @property
    def keeps_lists(self) -> bool:
        """Whether any sorted list of edges may be kept."""
        return self.keep_lists or self.constant_weights

    def _check_depth(self) -> None:
        depth = self.queue_depth
        if depth is None:
            return
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 2 or depth % 2:
            raise OptionError(f"option queue_depth={depth!r} is not an even number of tiles", "use 2, 4, 6, ...")
        if self.strategy in ("bulk", "vertical"):
            raise OptionError(
                f"queue_depth={depth} contradicts strategy={self.strategy!r}, which has no on-chip queues",
                "use strategy='spatial' or 'auto', or leave queue_depth out",
            )

    @property
    def cache_folder(self) -> Path:
        """The folder for plans and kernels, whether or not it exists."""
        return default_cache_folder() if self.cache_dir is None else self.cache_dir

    def with_(self, **changes: object) -> Options:
        """A copy with ``changes``, checked like ``parse``."""
        _known(changes)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]


def default_cache_folder() -> Path:
    """``$TILESTREAM_CACHE_DIR``, else ``~/.cache/tilestream``; without a home, a temporary folder."""
    named = os.environ.get("TILESTREAM_CACHE_DIR")
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "tilestream"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"tilestream-{os.getuid()}"


def parse(given: Mapping[str, object] | Options | None) -> Options:
    """Options from the mapping that a user wrote.

    Raises:
        OptionError: an option is unknown (with a suggestion), out of range, or contradicts another.
    """
    if isinstance(given, Options):
        return given
    given = dict(given or {})
    _known(given)
    return Options(**given)  # pyright: ignore[reportArgumentType]


def split(given: Mapping[str, object] | Options | None, mode: str | None = None) -> tuple[Options, dict[str, Any]]:
    """Our options, and Inductor's configuration for what it compiles: the options that are its own, and ``mode``.

    Args:
        given: fields of ``Options``; names of Inductor's configuration, as ``max_autotune`` or ``triton.cudagraphs``;
            and ``mode``, since ``torch.compile`` takes no ``mode=`` beside ``options=``.
        mode: one of ``torch.compile``'s modes.

    Raises:
        OptionError: as ``parse``; or there is no such mode.
    """
    if isinstance(given, Options):
        return given, _of_mode(mode)
    given = dict(given or {})
    patches = _of_mode(given.pop("mode", mode))
    names = {f.name for f in fields(Options)}
    others = {name.replace("-", "_"): value for name, value in given.items() if name not in names}
    if others:
        from torch._inductor import config

        known = config.get_config_copy()
        patches |= {name: value for name, value in others.items() if name in known}
    return parse({name: value for name, value in given.items() if name.replace("-", "_") not in patches}), patches


def _of_mode(mode: object) -> dict[str, Any]:
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        near = difflib.get_close_matches(str(mode), modes, n=1)
        raise OptionError(f"mode={mode!r} is not known", f"use {near[0] if near else ', '.join(modes)!r}")
    return dict(modes[str(mode)])


def _known(given: Mapping[str, object]) -> None:
    names = [f.name for f in fields(Options)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(names)}"
            raise OptionError(f"unknown option {name!r}", remedy)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(allowed)}"
        raise OptionError(f"option {name}={value!r} is not known", remedy)
