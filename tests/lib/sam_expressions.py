"""What SAM's own graphs compute, by the names of their files: dense references, operands in the comments' order."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Expression = Callable[..., Array]


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _quotient(b: Array, c: Array) -> Array:
    return np.where((b != 0) & (c != 0), b / np.where(c == 0, 1, c), 0)


def _exp_of_leaky_sum(b: Array, c: Array) -> Array:
    both = b + c
    return np.where((b != 0) | (c != 0), np.exp(np.maximum(both, 0.2 * both)), 0)


_EXPRESSIONS: tuple[tuple[str, Expression], ...] = (
    (r"fp_relu_(matmul|spmm)_\w+", lambda b, c: b @ _relu(c)),
    (r"(matmul|spmm|spmv)\w*_relu\w*", lambda b, c: _relu(b @ c)),
    (r"spm_spm_\w+|mat_vecmul_iter_short", lambda b, c, d: b @ c @ d),
    (r"mat_vecmul_iter", lambda b, c, d, e, f: b @ c @ d @ e @ f),
    (r"concat_matmul\w*", lambda b, c, d, e: b @ c + d @ e),
    (r"(fp_)?(matmul|spmm|spmv|spm_dm_matmul)\w*|mat_vecmul_\w+|tensor3_ttv", lambda b, c: b @ c),
    (r"tensor3_ttm", lambda b, c: np.einsum("ijl,kl->ijk", b, c)),
    (r"tensor3_mttkrp", lambda b, c, d: np.einsum("ikl,jk,jl->ij", b, c, d)),
    (r"tensor3_mttkrp_unfused1", lambda c, d: np.einsum("jk,jl->jkl", c, d)),
    (r"tensor3_mttkrp_unfused2", lambda b, t: np.einsum("ikl,jkl->ij", b, t)),
    (r"tensor3_innerprod", lambda b, c: (b * c).sum()),
    (r"tensor3_website_expr", lambda b, c, d, e, f: np.einsum("i,j,ijk,jl,lmn->", b, c, d, e, f)),
    (r"mat_sddmm|mat_mask_tri_partial", lambda b, c, d: b * (c @ d)),
    (r"mat_mask_tri(_fiberwrite)?", lambda b, c, d: (b * (c @ d)).sum()),
    (r"mat_mask_tri_DA3_final", lambda a, b, c, d: a * (b @ c @ d)),
    (r"mat_mask_tri_DA3sum_final", lambda a, b, c, d: (a * (b @ c @ d)).sum()),
    (r"mat_residual", lambda b, c, d: b - c @ d),
    (r"mat_mattransmul", lambda b, c, d, e, f: b * (c.T @ d) + e * f),
    (r"(mat|vec)_spacc_simple", lambda b: b.sum(0)),
    (r"masked_broadcast", lambda b, c: (b != 0) * c[None, :]),
    (r"trans_masked_broadcast", lambda b, c: (b != 0) * c[:, None]),
    (r"mat_elemadd_leakyrelu_exp", _exp_of_leaky_sum),
    (r"mat_elemadd_relu", lambda b, c: _relu(b + c)),
    (r"mat_elemadd3", lambda b, c, d: b + c + d),
    (r"(vec|mat|tensor3)_elemadd|mat_sp2dn", lambda b, c: b + c),
    (r"vec_sub", lambda b, c: b - c),
    (r"(vec|mat|tensor3)_elemmul|vec_scalar_mul", lambda b, c: b * c),
    (r"mat_elemdiv", _quotient),
    (r"(vec|mat|tensor3)_identity(_dense)?|mat_dn2sp|vec_(ds|sd)_compression_\w+", lambda b: b),
)


def expression(name: str) -> Expression:
    """What the graph of this name computes. Raises: KeyError for a name that is none of SAM's."""
    found = [one for pattern, one in _EXPRESSIONS if re.fullmatch(pattern, name)]
    if not found:
        raise KeyError(f"{name} is none of the names of SAM's graphs")
    return found[0]
