"""wgmma wrappers: one specialisation of ``Mma<T, BLOCKS>`` for each dtype and width that a kernel uses."""

from __future__ import annotations

_SHAPE = {
    "bf16": ("k16", "bf16.bf16", ", 0, 0", ", 0"),
    "f16": ("k16", "f16.f16", ", 0, 0", ", 0"),
    "f32": ("k8", "tf32.tf32", "", ""),
}
_FROM_SHARED = '"l"(a), "l"(b)'
_FROM_REGISTERS = ", ".join(f'"r"(a.v[k + {i}])' for i in range(4)) + ', "l"(b)'


def specialisation(dtype: str, blocks: int, starts: bool = False) -> str:
    """C++ source for acc[64, 8 AT to 8 (AT + blocks)] += A @ B.T, A from shared memory or (16-bit) from registers.

    Operands are K-major. Accumulators are initialised by the caller; with ``starts`` there is a product from shared
    memory more, whose scale-d is zero: acc = A @ B.T.
    """
    _, _, trans_both, trans_b = _SHAPE[dtype]
    first = "4 * AT + "

    def of_shared(what: str, adds: bool = True) -> str:
        head = f"template <int BLOCKS>\n  static TS_DEV void {what}(Fragment<BLOCKS>& acc, u64 a, u64 b)"
        return _method(head, _wgmma(dtype, blocks, trans_both, first=first, adds=adds))

    registers = _method(
        "template <int BLOCKS, int ABLOCKS>\n"
        "  static TS_DEV void registers(Fragment<BLOCKS>& acc, const Packed<ABLOCKS>& a, int k, u64 b)",
        _wgmma(dtype, blocks, trans_b, registers=True, first=first),
    )
    body = of_shared("shared") + (of_shared("start", False) if starts else "") + (registers if dtype != "f32" else "")
    return f"template <int AT>\nstruct Mma<{dtype}, {blocks}, AT> {{\n{body}}};\n"


def of_columns(dtype: str, blocks: int, b_columns: bool) -> str:
    """C++ source for acc[64, 8 blocks] += A.T @ B, both in shared memory as [depth, columns]: 16-bit types alone.

    Without ``b_columns`` B is [8 blocks, depth], as for ``specialisation``.
    """
    name = f"MmaColumns<{dtype}, {blocks}, {str(b_columns).lower()}>"
    return _struct(name, _method(_shared(blocks), _wgmma(dtype, blocks, f", 1, {int(b_columns)}")))


def mixed(dtype: str, blocks: int, starts: bool = False) -> str:
    """C++ source for acc[64, 8 blocks] += A @ B, both in shared memory, A as [64, depth], B as [depth, columns].

    With ``starts`` also for acc = A @ B.
    """
    methods = _method(_shared(blocks), _wgmma(dtype, blocks, ", 0, 1"))
    if starts:
        methods += _method(_shared(blocks, "start"), _wgmma(dtype, blocks, ", 0, 1", adds=False))
    return _struct(f"MmaMixed<{dtype}, {blocks}>", methods)


def by_rows(dtype: str, blocks: int) -> str:
    """C++ source for acc[64, 8 blocks] += A @ B, A packed in registers, B in shared memory as [depth, columns]."""
    head = (
        "template <int ABLOCKS>\n"
        f"  static TS_DEV void registers(Fragment<{blocks}>& acc, const Packed<ABLOCKS>& a, int k, u64 b)"
    )
    return _struct(f"MmaRows<{dtype}, {blocks}>", _method(head, _wgmma(dtype, blocks, ", 1", registers=True)))


def _shared(blocks: int, name: str = "shared") -> str:
    return f"static TS_DEV void {name}(Fragment<{blocks}>& acc, u64 a, u64 b)"


def _struct(name: str, methods: str) -> str:
    """A whole specialisation."""
    return f"template <>\nstruct {name} {{\n{methods}}};\n"


def _method(head: str, statement: str) -> str:
    return f"  {head} {{\n{statement}  }}\n"


def _wgmma(
    dtype: str, blocks: int, transposed: str, registers: bool = False, first: str = "", adds: bool = True
) -> str:
    """The statement that issues one product of 64 x ``8 blocks``, whose operands the method around it names a, b, k.

    Args:
        transposed: the instruction's last operands, which say what lies [depth, columns]; tf32 has none.
        registers: A is in registers, four words from ``a.v[k]``, and not in shared memory.
        first: C++ for the accumulator to begin at, up to a trailing ``+``.
        adds: to what the accumulators hold (scale-d one).
    """
    depth, types, _, _ = _SHAPE[dtype]
    count = 4 * blocks
    acc = _listed(0, count)
    a, b = (_listed(count, 4), count + 4) if registers else (f"%{count}", count + 1)
    name = f"wgmma.mma_async.sync.aligned.m64n{8 * blocks}{depth}.f32.{types}"
    scale = f"setp.{'eq' if adds else 'ne'}.u32 p, 0, 0;"
    text = f"{{\\n.reg .pred p;\\n{scale}\\n{name} {acc}, {a}, %{b}, p, 1, 1{transposed};\\n}}"
    outs = ", ".join(f'"{"+" if adds else "="}f"(acc.v[{first}{i}])' for i in range(count))
    ins = _FROM_REGISTERS if registers else _FROM_SHARED
    return f'    asm volatile("{text}"\n                 : {outs}\n                 : {ins});\n'


def _listed(first: int, count: int) -> str:
    """``count`` operands of an asm statement as one of the instruction's: {%4, %5}."""
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"
