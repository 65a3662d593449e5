"""The forward and backward ATen graphs of a model, without running it: Dynamo and AOTAutograd on fake tensors.

Nothing is allocated, so that models of any size can be captured; no decompositions, so that operators stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tilestream.errors import CaptureError
from tilestream.graph.capture import alone, boxed
from tilestream.graph.fake import fake_tensor, twin

Mode = Literal["inference", "training"]

_STORED = re.compile(r"_(parameters|buffers)_")


@dataclass
class Recorded:
    """fx graphs with ``meta["val"]``; the backward graph reads what the forward graph saved under the same names.

    ``stored`` are the forward graph's placeholders that are parameters or buffers. ``places`` says of each placeholder
    what it is: the name of a parameter or buffer, or which input.
    """

    forward: fx.Graph
    backward: fx.Graph | None = None
    stored: set[str] = field(default_factory=set)
    places: dict[str, str | int] = field(default_factory=dict)

    @property
    def saved(self) -> int:
        """How many of the forward graph's last results are saved for the backward graph alone."""
        if self.backward is None:
            return 0
        return sum(n.op == "placeholder" and not n.name.startswith("tangents") for n in self.backward.nodes)


def record(module: nn.Module, inputs: Sequence[Any], mode: Mode) -> Recorded:
    """The graphs of ``module(*inputs)``; tensors of both may be on the meta device.

    Training keeps what eager PyTorch keeps for the backward pass: nothing is recomputed.

    Raises:
        CaptureError: the model branches on data, Dynamo or AOTAutograd refuse it, or training has nothing to train.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs: list[fx.GraphModule] = []
    stored: list[bool] = []
    given: list[Any] = []
    fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return boxed(_as_traced(graph, fakes))

    def backend(graph: fx.GraphModule, example: list[Any]) -> Any:
        stored.extend(bool(_STORED.search(node.name)) for node in graph.graph.nodes if node.op == "placeholder")
        given.extend(example)
        compiler = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, inference_compiler=keep, partition_fn=default_partition
        )
        return compiler(graph, example)

    training = mode == "training"
    try:
        fake = twin(module, fakes, device="cpu")
        arguments = [fake_tensor(x, fakes, device="cpu") if isinstance(x, torch.Tensor) else x for x in inputs]
        with fakes, torch.set_grad_enabled(training):
            results = torch.compile(alone(fake), backend=backend, fullgraph=True, dynamic=False)(*arguments)
            if training:
                _backward(results)
    except CaptureError:
        raise
    except Exception as failure:
        text = str(failure).strip().splitlines()
        raise CaptureError(
            f"{type(module).__name__} could not be captured: {text[0] if text else type(failure).__name__}",
            "check that it runs eagerly on these inputs and does not branch on data; TORCH_LOGS=dynamo tells more",
        ) from failure
    if not graphs:
        raise CaptureError(
            f"{type(module).__name__} made no graph of tensor operations", "give a model that computes on its inputs"
        )
    forward = graphs[0].graph
    places = [node.name for node in forward.nodes if node.op == "placeholder"]
    known: dict[int, str | int] = {id(x): i for i, x in enumerate(arguments)}
    known |= {id(x): name for name, x in (*fake.named_buffers(), *fake.named_parameters())}
    return Recorded(
        forward,
        graphs[1].graph if training else None,
        {name for name, is_stored in zip(places, stored, strict=False) if is_stored},
        {name: known[id(x)] for name, x in zip(places, given, strict=False) if id(x) in known},
    )


def _as_traced(graph: fx.GraphModule, fakes: Any) -> Callable[[list[Any]], list[Any]]:
    """A call of ``graph``, whose sizes are fixed: results like those that it was traced with. To run it on fake tensors
    would be to trace it once more."""
    (results,) = next(n for n in graph.graph.nodes if n.op == "output").args
    values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in results]

    def call(args: list[Any]) -> list[Any]:
        args.clear()
        return [fake_tensor(x.detach(), fakes) if isinstance(x, torch.Tensor) else x for x in values]

    return call


def _backward(results: Any) -> None:
    outs = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outs:
        raise CaptureError(
            "nothing of the model takes gradients", "set requires_grad on its parameters, or capture it for inference"
        )
    torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])
