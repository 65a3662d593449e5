"""Fits the constants of ``kernels.coefficients.shared_tile`` on the variants of G4 and G8, and judges all.

    python -m benchmarks.fit.fit_shared_tile

Fitted: those of ``FITTED``, 14 numbers on 42 times (21 variants, warm and cold), each held near where it began by a
prior of a factor e for an error of 5 % in one time. Not fitted: the gap between launches and the latency of flags
(clocks inside the kernel, of G4), and the rates of DRAM and L2 (the device's).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from tilestream import devices
from tilestream.kernels.coefficients.shared_tile import Coefficients
from tilestream.studies.flashfuser.hand_written import cost
from tilestream.studies.flashfuser.measured import FIT, variants
from tilestream.studies.flashfuser.truth import judged

FITTED = {
    "first_s": 1.0e-6,
    "first_dram_s": 0.4e-6,
    "cluster_s": 0.4e-6,
    "lock_step": 0.05,
    "port_bytes_per_s": 100e9,
    "latency_s": 1.7e-6,
    "skew": 0.08,
    "dsm_port_bytes_per_s": 17e9,
    "dsm_step_s": 0.5e-6,
    "tail_s": 1.3e-6,
    "tail_dsm_s": 1.2e-6,
    "add_bytes_per_s": 8e12,
    "partials_bytes_per_s": 3e12,
    "atomics_bytes_per_s": 2.8e12,
}
"""Where the fit begins: clocks of G4, or a guess."""

PRIOR = 0.05


def fit() -> Coefficients:
    """The constants that are nearest to the times of the shapes ``FIT``, by least squares of their logarithms."""
    device = devices.get("h200")
    rows = [v for v in variants() if v.shape in FIT]
    start = np.log(list(FITTED.values()))

    def made(logs: np.ndarray) -> Coefficients:
        return replace(Coefficients(), **dict(zip(FITTED, map(float, np.exp(logs)), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        rates = made(logs)
        found = [
            np.log(cost(v.chain, v.variant, device, cold, rates).us / us)
            for v in rows
            for cold, us in ((False, v.warm_us), (True, v.cold_us))
        ]
        return np.concatenate([found, PRIOR * (logs - start)])

    return made(least_squares(errors, start).x)


if __name__ == "__main__":
    best = fit()
    for name in FITTED:
        print(f"    {name}: float = {getattr(best, name):.4g}")
    for score in judged(best):
        print(score)
