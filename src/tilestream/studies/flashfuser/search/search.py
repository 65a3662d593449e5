"""The search for a chain's kernel: by the model in under a second, by measurement of its best few in under a minute."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tilestream.devices import Device
from tilestream.errors import OptionError, PlanError
from tilestream.plan.cache import versions
from tilestream.studies.flashfuser.dataflow.chain import Chain
from tilestream.studies.flashfuser.search.cost import cost
from tilestream.studies.flashfuser.search.enumerate import variants
from tilestream.studies.flashfuser.search.variant import TILE, Middle, SharedTile, sequential

log = logging.getLogger(__name__)

TOP = 11
"""Candidates that are compiled and timed, as many as FlashFuser's."""

BATCH = 4
"""Candidates that are compiled side by side."""

BUDGET_S = 60.0
"""Of a measured search: what is not timed by then is not timed."""

BINS = (16, 32, 64, 128, 256, 512)
"""Numbers of rows that a search is made for; more are taken as they are, in multiples of the last."""


class Effort(StrEnum):
    """``MODEL``: the best prediction is chosen. ``MEASURED``: the best of the ``TOP`` predictions that are timed."""

    MODEL = "model"
    MEASURED = "measured"


@dataclass(frozen=True)
class Candidate:
    """A kernel with its predicted time in microseconds, and its measured one, or why it could not be timed."""

    variant: SharedTile
    predicted_us: float
    measured_us: float | None = None
    rejected: str = ""


Measure = Callable[[Sequence[Candidate]], Sequence[float | Exception]]
"""Compiles and times candidates side by side: microseconds of one call of each, or why one could not be timed."""


@dataclass(frozen=True)
class Search:
    """What a search of ``chain`` (with the rows of its bin) found: the best few, best first, and of how many.

    ``best`` is the measured best where times were taken, else the best predicted one.
    """

    chain: Chain
    device: str
    top: tuple[Candidate, ...]
    candidates: int
    seconds: float

    @property
    def best(self) -> Candidate:
        timed = [c for c in self.top if c.measured_us is not None]
        return min(timed, key=lambda c: c.measured_us or 0.0) if timed else self.top[0]


def search(
    chain: Chain,
    device: Device,
    effort: Effort | str = Effort.MODEL,
    measure: Measure | None = None,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    deterministic: bool = True,
    middles: Sequence[Middle] = tuple(Middle),
    budget_s: float = BUDGET_S,
) -> Search:
    """The kernel for ``chain`` on ``device``, of those that exist (``SharedTile.built``). A gate runs as two branches
    in each CTA.

    Args:
        measure: times candidates; asked for a few at a time, so that the budget can be kept.
        cache: a folder of finished searches, one for each bin of rows.
        deterministic: only tails that add in a fixed order, so that the same input gives the same bits.
        middles: where C may be exchanged.

    Raises:
        OptionError: the effort is unknown, or measured without ``measure``.
        PlanError: no kernel of the family can run the chain; says what it would need.
    """
    effort = _effort(effort, measure)
    started = time.perf_counter()
    chain = binned(sequential(chain))
    path = cache / f"{_key(chain, device, effort, deterministic, middles)}.json" if cache is not None else None
    if path is not None and (found := _load(path, chain, device)) is not None:
        return found
    progress(f"{chain.name}: candidates of {chain.m} rows")
    ranked = [c for c in rank(chain, device, deterministic, middles) if c.variant.built]
    if not ranked:
        raise PlanError(
            f"chain {chain.name!r} (m {chain.m}, n {chain.n}, k {chain.k}, l {chain.l}) has no kernel of CTAs that"
            f" share a tile on {device.name!r}: {-(-chain.m // TILE)} tiles of {TILE} rows on {device.sms} SMs, l in"
            " equal parts of a multiple of 8 columns",
            "leave it to two products",
        )
    top = tuple(ranked[:TOP])
    if effort is Effort.MEASURED and measure is not None:
        top = _measured(top, measure, progress, started + budget_s)
    made = Search(chain, device.name, top, len(ranked), time.perf_counter() - started)
    if path is not None:
        _store(path, made)
    return made


def rank(
    chain: Chain, device: Device, deterministic: bool = False, middles: Sequence[Middle] = tuple(Middle)
) -> list[Candidate]:
    """All candidates, with a kernel or without, best predicted first; of those that differ in how rings share the
    memory alone, the best."""
    best: dict[SharedTile, Candidate] = {}
    for v in variants(chain, device):
        if v.middle in middles and (v.deterministic or not deterministic):
            plain = replace(v, stages=0, weight_stages=0, depth2=0)
            made = Candidate(v, cost(chain, v, device).us)
            if plain not in best or made.predicted_us < best[plain].predicted_us:
                best[plain] = made
    return sorted(best.values(), key=lambda c: c.predicted_us)


def binned(chain: Chain) -> Chain:
    """``chain`` with the rows of its bin: one kernel serves every number of rows up to that."""
    rows = next((b for b in BINS if chain.m <= b), -(-chain.m // BINS[-1]) * BINS[-1])
    return replace(chain, m=rows) if chain.image is None else chain  # an image has the size it has


def _effort(given: Effort | str, measure: Measure | None) -> Effort:
    if given not in tuple(Effort):
        raise OptionError(f"effort is {given!r}", f"use one of: {', '.join(Effort)}")
    if Effort(given) is Effort.MEASURED and measure is None:
        raise OptionError("effort 'measured' needs a GPU to measure on", "use effort='model', or give measure=")
    return Effort(given)


def _measured(
    top: tuple[Candidate, ...], measure: Measure, progress: Callable[[str], None], until: float
) -> tuple[Candidate, ...]:
    """``top`` with times, a few candidates at a time until the budget is used up."""
    made: list[Candidate] = []
    for start in range(0, len(top), BATCH):
        group = top[start : start + BATCH]
        if time.perf_counter() >= until:
            made += [replace(c, rejected="not timed: the budget of the search was used up") for c in group]
            continue
        progress(f"timing {start + 1} to {start + len(group)} of {len(top)}")
        for c, found in zip(group, measure(group), strict=True):
            if isinstance(found, Exception):
                log.warning("%s could not be measured: %s", c.variant, found)
                made.append(replace(c, rejected=f"could not be measured: {found}"))
            else:
                made.append(replace(c, measured_us=found))
    return tuple(made)


def _key(chain: Chain, device: Device, effort: Effort, deterministic: bool, middles: Sequence[Middle]) -> str:
    parts: dict[str, Any] = {
        "chain": {**asdict(chain), "name": ""},
        "device": asdict(device),
        "effort": effort,
        "deterministic": deterministic,
        "middles": sorted(middles),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _store(path: Path, made: Search) -> None:
    """A folder that cannot be written costs the next search its time, and nothing else."""
    data = {
        "candidates": made.candidates,
        "seconds": made.seconds,
        "top": [{**asdict(c), "variant": c.variant.json()} for c in made.top],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(data), encoding="utf-8")
        fresh.replace(path)
    except OSError as failure:
        log.warning("the search is not kept: %s", failure)


def _load(path: Path, chain: Chain, device: Device) -> Search | None:
    """A file that is missing or damaged is no search."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        top = tuple(Candidate(**{**c, "variant": SharedTile.read(c["variant"])}) for c in data["top"])
        return Search(chain, device.name, top, data["candidates"], data["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
