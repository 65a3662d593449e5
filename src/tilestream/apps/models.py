"""The five applications of Kitsune's evaluation as whole models, by name, with every size an argument.

``make`` builds them on the meta device by default: shapes and dtypes without memory, which is all that a capture needs
(Llama 3 8B and a whole globe included). With ``device="cpu"`` and smaller sizes they run.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilestream.apps import dlrm, graphcast, llama, meshgraphnets, nerf
from tilestream.errors import OptionError


@dataclass(frozen=True)
class Model:
    """A model, its sizes and its inputs.

    Attributes:
        sizes: a frozen dataclass of every size, with the published values as defaults.
        module, inputs: make the module and its fp32 or int64 inputs from the sizes, on torch's default device.
        published: sizes that differ from the dataclass's defaults.
        cut: the part and the batch that Table 2 of the paper is compared with, as changes of ``published``.
        training_cut: what differs from ``cut`` in its rows of training.
        hidden: which inputs are hidden states of a longer model and take gradients in training.
        trains: whether the paper trains it.
    """

    name: str
    doc: str
    sizes: type[Any]
    module: Callable[[Any], nn.Module]
    inputs: Callable[[Any], tuple[Tensor, ...]]
    published: Mapping[str, Any] = field(default_factory=dict)
    cut: Mapping[str, Any] = field(default_factory=dict)
    training_cut: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()
    trains: bool = True

    def resolved(self, cut: bool = False, training: bool = False, **changes: Any) -> Any:
        """The sizes: published, then those of Table 2's row for training or inference if ``cut``, then ``changes``.

        Raises:
            OptionError: there is no size of that name, or it is below its least value.
        """
        known = {f.name for f in dataclasses.fields(self.sizes)}
        for name, value in changes.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}? The sizes are" if near else "the sizes are"
                raise OptionError(f"{self.name} has no size called {name!r}", f"{hint} {', '.join(sorted(known))}")
            least = 0 if name in ("context", "grid_to_mesh") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise OptionError(f"{name} of {self.name} is {value}", f"use at least {least}")
        sizes = {**self.published, **changes}
        if cut:
            sizes = {**self.published, **self.cut, **(self.training_cut if training else {}), **changes}
        return self.sizes(**sizes)

    def make(
        self,
        *,
        training: bool = False,
        cut: bool = False,
        device: str = "meta",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        **changes: Any,
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs: floating point of ``dtype``, indices int64, complex64 as it is.

        Args:
            training: parameters take gradients, and so do inputs that are hidden states.
            cut: the part and batch of Table 2.
            device: ``meta`` (no memory), ``cpu`` or ``cuda``.

        Raises:
            OptionError: as ``resolved``.
        """
        sizes = self.resolved(cut, training, **changes)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            module = self.module(sizes).to(dtype).train(training).requires_grad_(training)
            inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in self.inputs(sizes))
        for index in self.hidden if training else ():
            if inputs[index].is_floating_point():
                inputs[index].requires_grad_()
        return module, inputs


@dataclass(frozen=True)
class NerfSizes:
    """``rows`` points in one call; ``depth`` layers of ``width``."""

    rows: int = 65536
    depth: int = 8
    width: int = 256
    points: int = 3 + 6 * nerf.POINT_BANDS
    views: int = 3 + 6 * nerf.VIEW_BANDS
    skip: int = 4


def _nerf(sizes: NerfSizes) -> nn.Module:
    return nerf.NeRF(sizes.depth, sizes.width, sizes.points, sizes.views, sizes.skip)


def _points(sizes: NerfSizes) -> tuple[Tensor, ...]:
    return torch.randn(sizes.rows, sizes.points), torch.randn(sizes.rows, sizes.views)


_LAYER = {"layers": 1, "layers_only": True}
_SMALL_GLOBE = {"latitudes": 181, "longitudes": 360, "level": 5, "grid_to_mesh": 101_892}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("nerf", "NeRF 8x256, skip, view branch", NerfSizes, _nerf, _points, cut={"rows": 10240}),
        Model("dlrm", "DLRM with MLPerf's sizes", dlrm.Sizes, dlrm.module, dlrm.inputs),
        Model(
            "mgn",
            "MeshGraphNets, 15 blocks, on cylinder flow",
            meshgraphnets.Sizes,
            meshgraphnets.module,
            meshgraphnets.inputs,
            cut={"steps": 2, "hand_on": True},
        ),
        Model("graphcast_full", "GraphCast, 0.25 degrees, mesh 6", graphcast.Sizes, graphcast.module, graphcast.inputs),
        Model(
            "graphcast_small",
            "GraphCast, 1 degree, mesh 5",
            graphcast.Sizes,
            graphcast.module,
            graphcast.inputs,
            published=_SMALL_GLOBE,
        ),
        Model(
            "graphcast_cut",
            "two blocks of GraphCast with embeddings and output, as many operators as the paper counts",
            graphcast.CutSizes,
            graphcast.cut_module,
            graphcast.cut_inputs,
        ),
        *(
            Model(
                f"llama_{name}{suffix}",
                f"Llama 3 8B, {doc}{', SDPA' if suffix else ', attention written out'}",
                llama.Sizes,
                llama.module,
                llama.inputs,
                published={**published, "sdpa": bool(suffix)},
                cut={**_LAYER, **cut},
                training_cut={"batch": 4, "tokens": 1024},
                hidden=(0,),
                trains=name == "prefill",
            )
            for name, doc, published, cut in (
                ("prefill", "1024 tokens", {}, {"batch": 8, "tokens": 256}),
                ("decode", "one token after 1023", {"tokens": 1, "context": 1023}, {"context": 127}),
            )
            for suffix in ("", "+sdpa")
        ),
    )
}


def find(name: str) -> Model:
    """The model called ``name``.

    Raises:
        OptionError: there is none.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, 1)
        hint = f"did you mean {near[0]!r}? The models are" if near else "the models are"
        raise OptionError(f"there is no whole model called {name!r}", f"{hint} {', '.join(MODELS)}")
    return MODELS[name]
