"""wgmma wrappers: one specialisation of ``Mma<T, BLOCKS>`` for each dtype and width that a kernel uses."""

from __future__ import annotations

_SHAPE = {
    "bf16": ("k16", "bf16.bf16", ", 0, 0", ", 0"),
    "f16": ("k16", "f16.f16", ", 0, 0", ", 0"),
    "f32": ("k8", "tf32.tf32", "", ""),
}


def specialisation(dtype: str, blocks: int, starts: bool = False) -> str:
    """C++ source for acc[64, 8 AT to 8 (AT + blocks)] += A @ B.T, A from shared memory or (16-bit) from registers.

    Operands are K-major. Accumulators are initialised by the caller; with ``starts`` there is a product from shared
    memory more, whose scale-d is zero: acc = A @ B.T.
    """
    depth, types, trans_both, trans_b = _SHAPE[dtype]
    count = 4 * blocks
    name = f"wgmma.mma_async.sync.aligned.m64n{8 * blocks}{depth}.f32.{types}"
    acc = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    a_regs = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    a_ins = ", ".join(f'"r"(a.v[k + {i}])' for i in range(4))

    def method(head: str, operands: str, ins: str, adds: bool = True) -> str:
        outs = ", ".join(f'"{"+" if adds else "="}f"(acc.v[4 * AT + {i}])' for i in range(count))
        scale = f"setp.{'eq' if adds else 'ne'}.u32 p, 0, 0;"
        text = f"{{\\n.reg .pred p;\\n{scale}\\n{name} {acc}, {operands};\\n}}"
        return f'  {head} {{\n    asm volatile("{text}"\n                 : {outs}\n                 : {ins});\n  }}\n'

    def of_shared(what: str, adds: bool) -> str:
        head = f"template <int BLOCKS>\n  static TS_DEV void {what}(Fragment<BLOCKS>& acc, u64 a, u64 b)"
        return method(head, f"%{count}, %{count + 1}, p, 1, 1{trans_both}", '"l"(a), "l"(b)', adds)

    shared = of_shared("shared", True) + (of_shared("start", False) if starts else "")
    registers = method(
        "template <int BLOCKS, int ABLOCKS>\n"
        "  static TS_DEV void registers(Fragment<BLOCKS>& acc, const Packed<ABLOCKS>& a, int k, u64 b)",
        f"{a_regs}, %{count + 4}, p, 1, 1{trans_b}",
        f'{a_ins}, "l"(b)',
    )
    body = shared + (registers if dtype != "f32" else "")
    return f"template <int AT>\nstruct Mma<{dtype}, {blocks}, AT> {{\n{body}}};\n"


def of_columns(dtype: str, blocks: int, b_columns: bool) -> str:
    """C++ source for acc[64, 8 blocks] += A.T @ B, both in shared memory as [depth, columns]: 16-bit types alone.

    Without ``b_columns`` B is [8 blocks, depth], as for ``specialisation``.
    """
    depth, types, _, _ = _SHAPE[dtype]
    count = 4 * blocks
    name = f"wgmma.mma_async.sync.aligned.m64n{8 * blocks}{depth}.f32.{types}"
    acc = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    text = f"{name} {acc}, %{count}, %{count + 1}, p, 1, 1, 1, {int(b_columns)};"
    outs = ", ".join(f'"+f"(acc.v[{i}])' for i in range(count))
    return (
        f"template <>\nstruct MmaColumns<{dtype}, {blocks}, {str(b_columns).lower()}> {{\n"
        f"  static TS_DEV void shared(Fragment<{blocks}>& acc, u64 a, u64 b) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\n{text}\\n}}"\n'
        f'                 : {outs}\n                 : "l"(a), "l"(b));\n  }}\n}};\n'
    )


def by_rows(dtype: str, blocks: int) -> str:
    """C++ source for acc[64, 8 blocks] += A @ B, A packed in registers, B in shared memory as [depth, columns]."""
    depth, types, _, _ = _SHAPE[dtype]
    count = 4 * blocks
    name = f"wgmma.mma_async.sync.aligned.m64n{8 * blocks}{depth}.f32.{types}"
    acc = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    text = f"{name} {acc}, {a}, %{count + 4}, p, 1, 1, 1;"
    outs = ", ".join(f'"+f"(acc.v[{i}])' for i in range(count))
    ins = ", ".join(f'"r"(a.v[k + {i}])' for i in range(4))
    return (
        f"template <>\nstruct MmaRows<{dtype}, {blocks}> {{\n  template <int ABLOCKS>\n"
        f"  static TS_DEV void registers(Fragment<{blocks}>& acc, const Packed<ABLOCKS>& a, int k, u64 b) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\n{text}\\n}}"\n'
        f'                 : {outs}\n                 : {ins}, "l"(b));\n  }}\n}};\n'
    )


def mixed(dtype: str, blocks: int) -> str:
    """C++ source for acc[64, 8 blocks] += A @ B, both in shared memory, A as [64, depth], B as [depth, columns]."""
    depth, types, _, _ = _SHAPE[dtype]
    count = 4 * blocks
    name = f"wgmma.mma_async.sync.aligned.m64n{8 * blocks}{depth}.f32.{types}"
    acc = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    text = f"{name} {acc}, %{count}, %{count + 1}, p, 1, 1, 0, 1;"
    outs = ", ".join(f'"+f"(acc.v[{i}])' for i in range(count))
    return (
        f"template <>\nstruct MmaMixed<{dtype}, {blocks}> {{\n"
        f"  static TS_DEV void shared(Fragment<{blocks}>& acc, u64 a, u64 b) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\n{text}\\n}}"\n'
        f'                 : {outs}\n                 : "l"(a), "l"(b));\n  }}\n}};\n'
    )
