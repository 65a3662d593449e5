"""What a run of a model may change, kept aside: so that a capture leaves it as it was, and each run starts alike."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tilestream.graph.fake import is_fake

_CONTAINERS = (list, dict, set, deque)
_DEEP = 4
"""So far into objects that a model is called with: a cache holds a list of layers, and each its tensors."""


class State:
    """A model and its inputs as they are when this is made, with the global random number generators.

    Kept are the attributes of every module (also ``training``) and what lists, dicts and sets among them hold, the
    gradients of parameters, and the state of torch's generators on the CPU and on every GPU that is in use, of Python's
    ``random`` and of NumPy's.

    Args:
        model: a module; or a function, whose modules and tensors are those of its closure, of its ``self`` and of the
            globals that it names.
        given: what it is called with, nested as one likes.
        values: also keep a copy of every tensor's elements. Only what is run with real tensors writes to them.
    """

    def __init__(self, model: Callable[..., Any], given: Any = (), values: bool = True) -> None:
        self._modules, held = _roots(model)
        around = list(_inside(given, _DEEP))
        self._inputs = _tensors(given)
        self._held = _tensors((held, [list(t.values()) if isinstance(t, dict) else list(t) for t in around]))
        self._contents = [(table, _copy(table)) for table in (*_tables(self._modules), *around)]
        found = self._named()
        self._lazy = [(x, x.data) for x in found.values() if is_lazy(x)]
        parts = [part for root in self._modules for part in root.modules()]
        self._classes = [(x, x.__class__) for x in (*parts, *(p for p, _ in self._lazy))]
        found = {name: x for name, x in found.items() if not is_lazy(x)}
        self._gradients = [(x, x.grad) for x in found.values() if x.is_leaf]
        gradients = [g for _, g in self._gradients if g is not None]
        self._storages = _storages([*found.values(), *gradients]) if values else {}
        self._before = {name: self._kept(x) for name, x in found.items()} if values else {}
        self._random = _random()

    def _named(self) -> dict[str, Tensor]:
        found = named(self._modules[0] if self._modules else None, self._inputs)
        for number, module in enumerate(self._modules[1:], 1):
            found |= {f"{number}.{name}": x for name, x in named(module).items()}
        return found | {f"held {i}": x for i, x in enumerate(self._held)}

    def _kept(self, x: Tensor) -> Tensor:
        """``x`` as it is now: a view of its storage's copy, where there is one."""
        copied = self._storages.get(_address(x)) if _strided(x) else None
        if copied is None:
            return x.detach() if is_fake(x) else x.detach().clone()
        return x.detach().new_empty(0).set_(copied[1], x.storage_offset(), x.size(), x.stride())

    def restore(self) -> None:
        """Undo what runs have written and rebound, and give the generators their states back."""
        for table, contents in self._contents:
            if not _same(table, contents):
                _refill(table, contents)
        for parameter, empty in self._lazy:
            parameter.data = empty
        for each, kind in self._classes:
            if each.__class__ is not kind:  # what is lazy becomes another with its first call
                cast("Any", each).__class__ = kind
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for storage, copied in self._storages.values():
            if not torch.equal(_bytes(storage), _bytes(copied)):  # memory that was mapped for reading is not written
                storage.copy_(copied)
        for put, state in self._random:
            put(state)

    def written(self) -> tuple[str, ...]:
        """The names of the tensors that are not what they were."""
        now = self._named()
        return tuple(n for n, t in now.items() if n in self._before and not same_bits(t, self._before[n]))


@contextlib.contextmanager
def preserved(model: Callable[..., Any], given: Any = (), values: bool = True) -> Iterator[None]:
    """Inside, ``model`` may be run: afterwards all is as ``State`` found it, however the run ended."""
    state = State(model, given, values)
    try:
        yield
    finally:
        state.restore()


def named(module: nn.Module | None, inputs: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Every tensor that a run can write to and a later one can read, by name."""
    found = {f"input {i}": x for i, x in enumerate(inputs)}
    if module is None:
        return found
    found |= dict(module.named_parameters()) | dict(module.named_buffers())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = value
            elif isinstance(value, _CONTAINERS) and not name.startswith("_"):
                found |= {f"{path}.{name}[{i}]": x for i, x in enumerate(_tensors(value))}
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: NaN equals NaN, and 0 is not -0."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout) or a.layout is not torch.strided:
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def _roots(model: Callable[..., Any]) -> tuple[list[nn.Module], list[Tensor]]:
    """The modules and tensors that a call of ``model`` can reach by name."""
    if isinstance(model, nn.Module):
        return [model], []
    found: list[Any] = []
    if isinstance(model, MethodType):
        found.append(model.__self__)
        model = model.__func__
    if isinstance(model, FunctionType):
        for cell in model.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                found.append(cell.cell_contents)
        found += [model.__globals__[name] for name in model.__code__.co_names if name in model.__globals__]
    unique = {id(x): x for x in found}.values()
    return [x for x in unique if isinstance(x, nn.Module)], [x for x in unique if isinstance(x, Tensor)]


def _tables(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """What holds the attributes of modules: their dictionaries, and the containers that are their values."""
    for module in (part for root in modules for part in root.modules()):
        yield vars(module)
        yield from (value for value in vars(module).values() if isinstance(value, _CONTAINERS))


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Containers and attributes of objects in what a model is called with."""
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type, ModuleType)):
        return
    if isinstance(value, _CONTAINERS):
        yield value
    inner = list(value.values()) if isinstance(value, dict) else []
    if isinstance(value, (list, tuple, deque)):
        inner = list(value)
    elif hasattr(value, "__dict__"):
        yield vars(value)
        inner += list(vars(value).values())
    for each in inner:
        yield from _inside(each, depth - 1)


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(x for x in tree_leaves(value) if isinstance(x, Tensor))


def _copy(table: Any) -> Any:
    """The contents of a table, in their order; a set's are kept as one."""
    return dict(table) if isinstance(table, dict) else set(table) if isinstance(table, set) else list(table)


def _same(table: Any, contents: Any) -> bool:
    """Whether a table holds the same objects in the same order."""
    if isinstance(table, set):
        return table == contents
    if len(table) != len(contents):
        return False
    if isinstance(table, dict):
        pairs = zip(table.items(), contents.items(), strict=True)
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in zip(table, contents, strict=True))


def _refill(table: Any, contents: Any) -> None:
    table.clear()
    if isinstance(table, (MutableMapping, set)):
        table.update(contents)
    else:
        table.extend(contents)


def _strided(x: Tensor) -> bool:
    return x.layout is torch.strided and not is_fake(x) and x.device.type != "meta"


def _address(x: Tensor) -> tuple[torch.device, int]:
    return (x.device, 0) if is_traceable_wrapper_subclass(x) else (x.device, x.untyped_storage().data_ptr())


def _storages(found: Sequence[Tensor]) -> dict[tuple[torch.device, int], tuple[torch.UntypedStorage, Any]]:
    """Whole storages with their copies: inputs may be views of each other, or have elements that share memory."""
    made: dict[tuple[torch.device, int], tuple[torch.UntypedStorage, Any]] = {}
    for x in found:
        if is_traceable_wrapper_subclass(x):
            made |= _storages([getattr(x, name) for name in x.__tensor_flatten__()[0]])
        elif _strided(x) and _address(x)[1] and _address(x) not in made:
            storage = x.untyped_storage()
            made[_address(x)] = (storage, storage.clone())
    return made


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _random() -> list[tuple[Callable[[Any], object], Any]]:
    """What sets each global generator, and its state."""
    found: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        found.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    return found
