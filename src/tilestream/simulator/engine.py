"""The events of one launch.

A worker is one replica of one stage. Its step starts when its input has arrived and ends when its work is done and
every queue it feeds has room. Times are seconds from the start of the launch.

Memory is one server each for DRAM and L2: requests are served in order of time, at the device's rate. Loads are asked
for one step ahead and stores are not waited for, as the kernels do. Of a hand-over, the cost model's exposed part is
work of the consumer and the rest passes between the two; a slot is free again when its consumers' steps have ended.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from math import ceil

from tilestream.cost import StageCost
from tilestream.devices import Device
from tilestream.errors import PipelineDeadlock
from tilestream.ir import DTYPE_BYTES, TILE_ROWS, Pipeline, Queue, Residency, Stage, Transport
from tilestream.work import bytes_of, tiles_of, weight_bytes


class Server:
    """A memory that serves requests one after another at a fixed rate; sharing, seen from a distance."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_s = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Time at which a request of ``seconds`` made at ``now`` is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


@dataclass
class Worker:
    """One replica and where it stands."""

    index: int
    stage: int
    replica: int
    step: int
    free_at: float
    loaded_at: float = 0.0
    started_at: float = 0.0
    worked_until: float = 0.0
    moved_at: float = 0.0  # when its work is done and its bytes have moved
    blocked_on: str = ""
    waited: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A finished step, in seconds of the launch."""

    worker: Worker
    step: int
    start: float
    end: float
    waited: float
    waited_for: str


class Launch:
    """Runs one launch to its end; ``records`` and ``seconds`` are the result."""

    def __init__(self, launch: Pipeline, rows: int, device: Device, steps_s: dict[str, StageCost]) -> None:
        self.device = device
        self.stages = launch.stages
        self.tiles = tiles_of(rows)
        self.step_s = [steps_s[s.name].step_s for s in launch.stages]
        self.steps = [ceil(self.tiles / s.tiles_per_step) for s in launch.stages]
        self.dram, self.l2 = Server(), Server()
        self.records: list[Record] = []
        self.ins: list[list[int]] = [
            [i for i, q in enumerate(launch.queues) if s.name in q.consumers] for s in self.stages
        ]
        self.outs: list[list[int]] = [
            [i for i, q in enumerate(launch.queues) if q.producer == s.name] for s in self.stages
        ]
        self.queues = [_Ring(q, launch, device) for q in launch.queues]
        self.load_s, self.store_s, self.l2_s = zip(*(_memory(s, launch, device) for s in self.stages), strict=True)
        self._events: list[tuple[float, int, int]] = []  # (time, 0 start or 1 finish, worker)
        self._sleeping: dict[tuple[int, str, int], list[int]] = defaultdict(list)  # (queue, what, tile) -> workers
        self.workers = self._make_workers(launch)
        self.seconds = self._run()

    def _make_workers(self, launch: Pipeline) -> list[Worker]:
        sms = sum(s.replicas for s in launch.stages)
        workers = []
        for index, stage in enumerate(launch.stages):
            ready = self.device.launch_s
            if stage.residency is Residency.RESIDENT:
                ready += weight_bytes(stage, launch) * sms / self.device.l2_shared_bytes_per_s
            for replica in range(min(stage.replicas, self.steps[index])):
                worker = Worker(len(workers), index, replica, replica, ready)
                worker.waited = {"launch": self.device.launch_s, "weights": ready - self.device.launch_s}
                workers.append(worker)
        return workers

    def _run(self) -> float:
        for worker in self.workers:
            worker.loaded_at = self.dram.serve(self.device.launch_s, self.load_s[worker.stage])
            self._try_start(worker)
        while self._events:
            now, kind, index = heapq.heappop(self._events)
            (self._start, self._finish)[kind](self.workers[index], now)
        self._check_done()
        return max(self.dram.free_at, *(worker.free_at for worker in self.workers))

    def _check_done(self) -> None:
        stuck = [w for w in self.workers if w.step < self.steps[w.stage]]
        if stuck:
            waits = sorted(
                {
                    f"{what} for tile {tile} in the queue of {self.queues[number].tile!r}"
                    for number, what, tile in self._sleeping
                }
            )
            raise PipelineDeadlock(
                f"{len(stuck)} of {len(self.workers)} workers cannot go on: they wait for {'; '.join(waits[:4])}",
                "check the pipeline with verify(): its queues hold too little",
            )

    def _tiles(self, worker: Worker) -> range:
        per_step = self.stages[worker.stage].tiles_per_step
        return range(worker.step * per_step, min((worker.step + 1) * per_step, self.tiles))

    def _try_start(self, worker: Worker) -> None:
        """Ask for the start of the worker's next step, or sleep until a tile that it lacks is sent."""
        at = worker.free_at
        reasons = {"dram": worker.loaded_at}
        for number in self.ins[worker.stage]:
            ring = self.queues[number]
            for tile in self._tiles(worker):
                if tile not in ring.arrives:
                    self._sleeping[number, "tile", tile].append(worker.index)
                    return
                reasons[ring.tile] = max(reasons.get(ring.tile, 0.0), ring.arrives[tile])
        last = max(reasons, key=lambda name: reasons[name])
        if reasons[last] > at:
            worker.waited[last] = worker.waited.get(last, 0.0) + reasons[last] - at
            at = reasons[last]
        heapq.heappush(self._events, (at, 0, worker.index))

    def _start(self, worker: Worker, now: float) -> None:
        stage = worker.stage
        replicas = self.stages[stage].replicas
        if worker.step + replicas < self.steps[stage]:
            worker.loaded_at = self.dram.serve(now, self.load_s[stage])
        moved = self.l2.serve(now, self.l2_s[stage])
        worker.started_at = now
        worker.worked_until = now + self.step_s[stage]
        if moved > worker.worked_until:
            worker.waited["l2"] = worker.waited.get("l2", 0.0) + moved - worker.worked_until
        worker.moved_at = max(worker.worked_until, moved)
        heapq.heappush(self._events, (worker.moved_at, 1, worker.index))

    def _finish(self, worker: Worker, now: float) -> None:
        """End the step at ``now`` or when there is room; sleep if the room's time is not known yet."""
        tiles = self._tiles(worker)
        at = now
        for number in self.outs[worker.stage]:
            ring = self.queues[number]
            for tile in tiles:
                old = tile - ring.depth
                if old < 0:
                    continue
                if ring.taken[old] < ring.consumers:
                    self._sleeping[number, "room", old].append(worker.index)
                    worker.blocked_on = f"{ring.tile} full"
                    return
                if ring.freed[old] > at:
                    at, worker.blocked_on = ring.freed[old], f"{ring.tile} full"
        if at > worker.moved_at:
            worker.waited[worker.blocked_on] = at - worker.moved_at
        self._record(worker)
        woken = []
        for number in self.outs[worker.stage]:
            ring = self.queues[number]
            for tile in tiles:
                ring.arrives[tile] = at + ring.flight_s
                woken += [(w, False) for w in self._sleeping.pop((number, "tile", tile), ())]
        for number in self.ins[worker.stage]:
            ring = self.queues[number]
            for tile in tiles:
                ring.taken[tile] += 1
                ring.freed[tile] = max(ring.freed[tile], at + ring.credit_s)
                if ring.taken[tile] == ring.consumers:
                    woken += [(w, True) for w in self._sleeping.pop((number, "room", tile), ())]
        self.dram.serve(at, self.store_s[worker.stage])
        worker.step += self.stages[worker.stage].replicas
        worker.free_at = at
        if worker.step < self.steps[worker.stage]:
            self._try_start(worker)
        for index, finishing in woken:
            if finishing:
                heapq.heappush(self._events, (max(at, self.workers[index].moved_at), 1, index))
            else:
                self._try_start(self.workers[index])

    def _record(self, worker: Worker) -> None:
        total = sum(worker.waited.values())
        reason = max(worker.waited, key=lambda name: worker.waited[name]) if total > 0 else ""
        self.records.append(Record(worker, worker.step, worker.started_at, worker.worked_until, total, reason))
        worker.waited = {}


class _Ring:
    """A queue's times: when each tile arrives, how many consumers have taken it, when its slot is free."""

    def __init__(self, q: Queue, launch: Pipeline, device: Device) -> None:
        payload = launch.tiles()[q.tile].bytes
        self.tile = q.tile
        self.depth = q.depth
        self.consumers = len(q.consumers)
        self.flight_s = (1 - device.queue_exposed) * device.queue_s(payload)
        self.credit_s = (1 - device.queue_exposed) * device.queue_s(1)
        self.arrives: dict[int, float] = {}
        self.taken: dict[int, int] = defaultdict(int)
        self.freed: dict[int, float] = defaultdict(float)


def _memory(stage: Stage, launch: Pipeline, device: Device) -> tuple[float, float, float]:
    """Seconds that one step asks of DRAM for loads and for stores, and of the L2."""
    tiles = launch.tiles()
    load = sum(bytes_of(launch.tensor(op.params[0]), TILE_ROWS) for op in stage.ops if op.kind == "load")
    store = sum(bytes_of(launch.tensor(op.params[0]), TILE_ROWS) for op in stage.ops if op.kind == "store")
    rings = 0
    for q in launch.queues:
        if q.transport is Transport.L2 and (stage.name == q.producer or stage.name in q.consumers):
            rings += TILE_ROWS * tiles[q.tile].features * DTYPE_BYTES[tiles[q.tile].dtype]
    per_step = stage.tiles_per_step
    weights = weight_bytes(stage, launch) if stage.residency is Residency.STREAMED else 0
    l2 = per_step * (load + store + rings) / device.l2_bytes_per_s + weights / device.l2_shared_bytes_per_s
    return per_step * load / device.dram_bytes_per_s, per_step * store / device.dram_bytes_per_s, l2
