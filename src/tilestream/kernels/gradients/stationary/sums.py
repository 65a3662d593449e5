"""A stage read as sums over rows: which tensors are multiplied, what becomes of the result."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import Pipeline, Stage, TileOp


@dataclass(frozen=True)
class Sums:
    """``weight[out, k] = sum over rows of left[rows, out] right[rows, k]`` and ``bias[out] = sum over rows of left``.

    Attributes:
        left, right: inputs. weight, bias: outputs; no ``bias``: an empty name.
        axes: names of out and k. sizes: theirs.
        product: the op, for its user's line.
    """

    left: str
    right: str
    weight: str
    bias: str
    axes: tuple[str, str]
    sizes: tuple[int, int]
    product: TileOp


def find_sums(stage: Stage, pipeline: Pipeline) -> Sums:
    """What a stage in plain form (``ir.plain``) sums.

    Raises:
        VerifyError: it does something else; names the op, by its user's line.
    """
    products = [op for op in stage.ops if op.kind == "product"]
    if len(products) != 1:
        raise VerifyError(
            f"stage {stage.name!r} has {len(products)} products, and a stationary sum keeps one result in registers",
            "use a stage for each",
        )
    (product,) = products
    assert product.out is not None
    where = product.source or f"product in stage {stage.name!r}"
    loaded = {op.out.name: op for op in stage.ops if op.kind == "load" and op.out is not None}
    names = tuple(a.name for a in product.out.axes)
    if len(names) != 2 or sums(product) != {ROWS.name} or any(a.size is None for a in product.out.axes):
        raise VerifyError(f"{where}: a stationary sum makes [out, k] of [rows, out] and [rows, k]", "write it so")
    operands = {view.axes: view.of for view in product.views}
    try:
        left, right = (loaded[operands[ROWS.name, name]] for name in names)
    except KeyError:
        raise VerifyError(
            f"{where}: operands are not two inputs [{ROWS.name}, {names[0]}] and [{ROWS.name}, {names[1]}] as loaded",
            "load them whole, and store what other ops make of them first",
        ) from None
    bias = next((op for op in stage.ops if op.kind == "sum" and op.ins == (left.out.name,)), None)  # pyright: ignore
    for op in stage.ops:
        if op.kind in ("load", "store") and any(
            len(at.axes) != 1 or at.offset or at.index or at.strides for at in op.views[-1].at or ()
        ):
            raise VerifyError(f"{op.source or op.kind}: parts of a tensor have no stationary sum", "use whole tensors")
        if op not in (product, left, right, bias) and op.kind != "store":
            raise VerifyError(
                f"{op.source or op.kind}: a {op.kind!r} has no place in a stationary sum",
                "put it into a stage of its own",
            )
    stored = {op.ins[0]: op.params[0] for op in stage.ops if op.kind == "store"}
    assert bias is None or bias.out is not None
    made = [product.out.name, *([bias.out.name] if bias is not None and bias.out is not None else [])]
    if set(stored) != set(made):
        raise VerifyError(f"{where}: stores {', '.join(stored) or 'nothing'} of {', '.join(made)}", "store both")
    dtypes = tuple(pipeline.tensor(op.params[0]).dtype for op in (left, right))
    if dtypes[0] != dtypes[1] or dtypes[0] not in ("bf16", "f16"):
        raise VerifyError(
            f"{where}: multiplies {dtypes[0]} and {dtypes[1]}; tensor cores take transposed operands of bf16 or f16",
            "cast both to bf16 or f16",
        )
    return Sums(
        left.params[0], right.params[0], stored[made[0]], stored[made[1]] if len(made) > 1 else "",
        (names[0], names[1]), (int(product.out.axes[0].size or 0), int(product.out.axes[1].size or 0)), product,
    )  # fmt: skip
