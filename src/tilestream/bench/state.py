"""What a run of a module may change, kept aside: so that the next run starts where the first one did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), Tensor)


class State:
    """The inputs of a module, its parameters, buffers and attributes, as they are when this is made."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._module = module
        self._inputs = tuple(inputs)
        self._attributes = [
            (m, dict(m._parameters), dict(m._buffers), {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)})
            for m in module.modules()
        ]
        # Whole storages: inputs may be views of each other, or have elements that share memory.
        kept = [t.untyped_storage() for t in named(module, inputs).values() if t.layout is torch.strided]
        self._storages = [(s, s.clone()) for s in {s.data_ptr(): s for s in kept}.values()]
        self._before = {name: t.detach().clone() for name, t in named(module, inputs).items()}

    def restore(self) -> None:
        """Undo what runs have written and rebound; attributes that they have added go."""
        for module, parameters, buffers, plain in self._attributes:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            for name in [k for k, v in vars(module).items() if isinstance(v, _PLAIN) and k not in plain]:
                if not name.startswith("_"):
                    delattr(module, name)
            vars(module).update(plain)
        for storage, kept in self._storages:
            storage.copy_(kept)

    def written(self) -> tuple[str, ...]:
        """The names of the tensors that are not what they were."""
        now = named(self._module, self._inputs)
        return tuple(n for n, t in now.items() if n in self._before and not same_bits(t, self._before[n]))


def named(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Every tensor that a run can write to and a later one can read, by name."""
    found = {f"input {i}": x for i, x in enumerate(inputs)}
    found |= dict(module.named_parameters()) | dict(module.named_buffers())
    for path, part in module.named_modules():
        found |= {f"{path}.{k}": v for k, v in vars(part).items() if isinstance(v, Tensor)}
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: NaN equals NaN, and 0 is not -0."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout) or a.layout is not torch.strided:
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
