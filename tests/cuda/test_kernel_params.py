"""A kernel's argument: the bytes are those that a C++ compiler lays the declared struct out as."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tilestream.cuda import sorted_keys
from tilestream.kernels.operators import (
    depthwise,
    few_keys_gradients,
    few_queries,
    interaction,
    norm_gradients,
    pack,
    pad,
    short_attention,
    squeeze,
    turn,
)
from tilestream.kernels.parts.params import MAP, Field, Struct, at_least_one, pointers
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.kernels.segments.reduce import reduction

INNER = Struct("Inner", (Field("int", "a"), Field("u64", "b")))
OUTER = Struct(
    "Outer",
    (
        Field("int", "first"),
        Field(MAP, "maps", 2),
        *pointers("to"),
        Field(INNER, "inner", 2),
        Field("float", "scale"),
    ),
)
STRUCTS = [
    OUTER, pack.kernel(3).argument, turn.PARAMS, pad.kernel(2).argument, few_queries.PARAMS, interaction.argument(5),
    depthwise.PARAMS, short_attention.PARAMS, squeeze.PARAMS, sorted_keys.KEYS,
    norm_gradients.PARAMS, few_keys_gradients.PARAMS,
    SegmentsKernel(reduction("sum", 8, "bf16", True)).argument,
]  # fmt: skip


def test_values_lie_where_the_fields_are() -> None:
    inner = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    packed = OUTER.pack(first=7, maps=[b"x" * 128, b"y" * 128], to=1 << 40, inner=inner, scale=1.0)
    assert len(packed) == OUTER.size == 384
    assert packed[:4] == (7).to_bytes(4, "little") and packed[64:320] == b"x" * 128 + b"y" * 128
    assert packed[320:328] == (1 << 40).to_bytes(8, "little")
    assert [int.from_bytes(packed[at : at + 8], "little") for at in (328, 336, 344, 352)] == [1, 2, 3, 4]
    assert packed[360:364] == bytes.fromhex("0000803f") and set(packed[364:]) == {0}


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_compiler_lays_out_the_same_sizes(tmp_path: Path) -> None:
    head = (
        "using u32 = unsigned; using u64 = unsigned long long; "
        "struct uint4 { int v[4]; }; struct alignas(64) TensorMap { u64 words[16]; };"
    )
    namespaces = [f"namespace n{n} {{\n{s.text}\n}}" for n, s in enumerate(STRUCTS)]
    sizes = [f"static_assert(sizeof(n{n}::{s.name}) == {s.size});" for n, s in enumerate(STRUCTS)]
    file = tmp_path / "sizes.cpp"
    file.write_text("\n".join([head, *namespaces, *sizes]))
    done = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "values, why",
    [
        ({"a": 1}, "differ in b"),
        ({"a": 1, "b": 2, "c": 3}, "differ in c"),
    ],
)
def test_a_field_without_a_value_is_refused(values: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        INNER.pack(**values)


def test_arrays_have_as_many_elements_as_declared() -> None:
    with pytest.raises(ValueError, match=r"maps has 2 elements, and 1 are given"):
        OUTER.pack(first=0, maps=[bytes(128)], to=0, inner=[], scale=0.0)
    assert at_least_one([]) == [0] and at_least_one([3]) == [3]
