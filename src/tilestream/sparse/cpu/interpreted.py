"""Generated loops left to Python, with numba's arithmetic: no exception where a number is not finite."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

import numpy as np
from scipy.special import erf as _erf

from tilestream.sparse.spec.arithmetic import rounded


class _Math:
    """``math`` as the generated code uses it."""

    inf, nan = math.inf, math.nan
    sqrt, log, sin, cos, tanh = np.sqrt, np.log, np.sin, np.cos, np.tanh
    atan, atan2 = np.arctan, np.arctan2
    erf = _erf


INTERPRETED = {"math": _Math, "divided": np.divide, "rounded": rounded}
"""What the code names."""


class _Quotients(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("divided", ast.Load()), [node.left, node.right], [])


def divided(source: str) -> ast.Module:
    """The code with ``divided(a, b)`` for ``a / b``: Python raises where ``b`` is 0."""
    return ast.fix_missing_locations(_Quotients().visit(ast.parse(source)))


def quietly(function: Callable[..., None]) -> Callable[..., None]:
    """The function without NumPy's warnings of numbers that are not finite."""

    def run(*arguments: object) -> None:
        with np.errstate(all="ignore"):
            function(*arguments)

    return run
