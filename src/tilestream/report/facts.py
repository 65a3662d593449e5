"""What the text, the page and the JSON all say of a pipeline, as plain data."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilestream.errors import TilestreamError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Queue, Stage, TileOp, Transport
from tilestream.ir.sizes import weight_bytes
from tilestream.ir.taps import Tap
from tilestream.plan.candidates import Candidate, Plan, expected_of
from tilestream.plan.shown import predicted_by

if TYPE_CHECKING:
    from tilestream.options import Options


def pipeline_facts(pipeline: Pipeline, *behind: Pipeline) -> dict[str, Any]:
    """Stages with the CTAs they run on, and queues with their sizes, launch by launch. Sizes in bytes.

    Args:
        behind: pipelines that run after it, whose launches are listed with its own.
    """
    launches = [launch for each in (pipeline, *behind) for launch in cut_at_dram(each)]
    return {
        "name": pipeline.name,
        "strategy": pipeline.strategy,
        "launches": [
            {
                "name": launch.name,
                "ctas": sum(s.replicas for s in launch.stages),
                "stages": stage_map(launch),
                "queues": [queue_facts(launch, q) for q in launch.queues],
            }
            for launch in launches
        ],
        "dram_queues": [queue_facts(pipeline, q) for q in pipeline.queues if q.transport is Transport.DRAM],
    }


def stage_map(launch: Pipeline) -> list[dict[str, Any]]:
    """Every stage of one launch with its range of CTAs; one CTA occupies one SM."""
    rows = []
    first = 0
    for stage in launch.stages:
        rows.append(
            {
                "name": stage.name,
                "ctas": [first, first + stage.replicas - 1],
                "replicas": stage.replicas,
                "group": stage.group,
                "in_flight": stage.in_flight,
                "ops": [op.kind for op in stage.ops],
                "summary": summary(stage, launch),
                "placement": f"Shard({stage.placement.dim})",
                "residency": stage.residency.value,
                "weight_bytes": weight_bytes(stage, launch),
                "source": stage.source,
                **_footprint(stage, launch),
            }
        )
        first += stage.replicas
    return rows


def queue_facts(pipeline: Pipeline, queue: Queue) -> dict[str, Any]:
    """A queue with the bytes of one tile and of its whole ring."""
    tile = pipeline.tiles()[queue.tile]
    size = pipeline.tile_rows * tile.row_bytes
    return {
        "tile": queue.tile,
        "producer": queue.producer,
        "consumers": list(queue.consumers),
        "transport": queue.transport.value,
        "depth": queue.depth,
        "features": tile.features,
        "dtype": tile.dtype,
        "tile_bytes": size,
        "ring_bytes": size * queue.depth,
    }


def summary(stage: Stage, pipeline: Pipeline) -> str:
    """The ops of a stage on one line: ``linear 256>256 + relu (x8), store``. Equal neighbours are counted."""
    words: list[str] = []
    for op in stage.ops:
        text = _word(op, pipeline)
        if op.kind not in ("load", "store", "linear") and words and words[-1].startswith("linear"):
            words[-1] += f" + {text}"
        else:
            words.append(text)
    counted = []
    for text, group in itertools.groupby(words):
        n = len(list(group))
        counted.append(text if n == 1 else f"{text} (x{n})")
    return ", ".join(counted)


def _word(op: TileOp, pipeline: Pipeline) -> str:
    if op.kind == "linear":
        outs, ins = pipeline.tensor(op.params[0]).shape
        return f"linear {ins}>{outs}"
    if op.kind in ("load", "store"):
        return f"{'gather' if op.index else 'tap' if Tap.of(op) else op.kind} {pipeline.tensor(op.params[0]).features}"
    return op.kind


def _footprint(stage: Stage, pipeline: Pipeline) -> dict[str, Any]:
    from tilestream.kernels.families import footprint

    try:
        made = footprint(stage, pipeline)
    except TilestreamError as problem:
        return {"shared_bytes": None, "registers": None, "problem": str(problem)}
    return {"shared_bytes": made.shared_bytes, "registers": made.registers, "shared_parts": dict(made.parts)}


def distinct(plan: Plan) -> list[tuple[Candidate, Pipeline]]:
    """The legal candidates with their pipelines, one a strategy: the chosen one, else the best by rank."""
    best: dict[str, Candidate] = {}
    for candidate in plan.candidates:
        held = best.get(candidate.strategy)
        if candidate.pipeline is None or held == plan.chosen:
            continue
        if held is None or candidate == plan.chosen or expected_of(candidate) < expected_of(held):
            best[candidate.strategy] = candidate
    return [(c, c.pipeline) for c in best.values() if c.pipeline is not None]


def candidate_facts(candidate: Candidate, predicted_us: float | None) -> dict[str, Any]:
    """A candidate without its pipeline: strategy, microseconds, why not."""
    return {
        "name": candidate.name,
        "strategy": candidate.strategy,
        "predicted_us": predicted_us,
        "predicted_by": "simulator" if candidate.pipeline is None else predicted_by((candidate.pipeline,)),
        "measured_us": candidate.measured_us,
        "rejected": candidate.rejected,
    }


def options_facts(options: Options) -> dict[str, Any]:
    """Options as JSON takes them."""
    return {
        name: value if value is None or isinstance(value, (bool, int)) else str(value)
        for name, value in asdict(options).items()
    }
