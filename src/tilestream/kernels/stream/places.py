"""Where each computed tile waits for its later users: registers while they last, else shared memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tilestream.errors import VerifyError
from tilestream.kernels.stream.model import ColumnLoop, Place, Places, ceil_to, share
from tilestream.kernels.stream.walk import Walk

# Registers of a consumer and of a loader thread, set by setmaxnreg. 256 and 128 threads share the 168 x 384
# that the CTA starts with: a split that asks for more waits for ever.
REGISTER_SPLITS = ((208, 88), (224, 56), (232, 40), (240, 24))
REGISTER_LIMIT = 232  # what a schedule may ask for: the rest of the largest split is slack for ptxas
# Addresses, ring cursors, temporaries: read off compiled kernels. Stages joined by queues have more of them.
OVERHEAD, OVERHEAD_WITH_QUEUES = 36, 64


def splits_for(registers: int) -> tuple[tuple[int, int], ...]:
    """The splits whose consumers have so many registers, or the last."""
    return tuple(split for split in REGISTER_SPLITS if split[0] >= registers) or REGISTER_SPLITS[-1:]


@dataclass(frozen=True)
class _Life:
    tile: str
    born: int
    products: tuple[int, ...]  # steps whose product reads it
    reads: tuple[int, ...]  # steps whose epilogue reads it

    @property
    def last(self) -> int:
        return max((*self.products, *self.reads), default=self.born)

    def free_for(self, step: int) -> bool:
        """A product is over when its epilogue writes, so its operand's place may be written then."""
        return self.last < step or (self.last == step and step not in self.reads)


def assign_places(b: Walk, in_place: Collection[tuple[str, str]] = ()) -> Places:
    """Registers first; while a step needs more than REGISTER_LIMIT, its longest-lived tile moves out.

    ``in_place``: (old, new) tiles, of which a step overwrites the one with the other as it reads it.

    Raises:
        VerifyError: chunks of a hidden layer are left no registers.
    """
    lives = _lives(b)
    wide = b.dtype == "f32" or b.stage.placement.dim == 1
    in_registers = {t for t in lives if not wide and t not in b.shared and b.stored(t) == b.dtype}
    parked = {t for t in b.block_names & lives.keys() if t not in b.shared and b.stored(t) == b.dtype}
    in_registers -= _mistaken(b) | parked
    while True:
        registers, crowded = _pressure(b, lives, in_registers)
        if registers <= REGISTER_LIMIT or not crowded:
            break
        if b.loops:  # what a loop reads every turn goes last
            every_turn = {p for draft in b.drafts if draft.layer and draft.linear for p in draft.linear.ins} | set(
                b.layers
            )
            crowded = [t for t in crowded if t not in every_turn] or crowded
        crowded = [t for t in crowded if t not in b.packed]
        if not crowded:
            raise VerifyError(
                f"stage {b.stage.name!r} needs {registers} > {REGISTER_LIMIT} registers a thread for a fragment and"
                " operands that can be in registers alone",
                "use smaller blocks, or let a loader bring the rows of indices",
            )
        in_registers.discard(max(crowded, key=lambda t: (lives[t].last - lives[t].born, b.features[t], t)))
    _check_chunks(b, lives, in_registers)
    shared = lives.keys() - in_registers - parked
    slots, slot_kinds = _colour(_only(lives, in_registers), b, 16)
    buffers, kinds = _colour(_only(lives, shared), b, b.pass_columns, in_place)
    parked_at, parked_features = _park(_only(lives, parked), b)
    ways = (
        (Place.SHARED, lives), (Place.REGISTERS, in_registers), (Place.PARKED, parked), (Place.SHARED, b.shared),
        (Place.ROW, b.rows), (Place.STREAM, b.streams),
    )  # fmt: skip
    return Places(
        {tile: place for place, tiles in ways for tile in tiles},
        slots, tuple(width for _, width in slot_kinds),
        buffers, tuple(width for _, width in kinds), tuple(dtype for dtype, _ in kinds),
        parked_at, parked_features, registers,
    )  # fmt: skip


def _only(lives: dict[str, _Life], tiles: Collection[str]) -> dict[str, _Life]:
    return {tile: life for tile, life in lives.items() if tile in tiles}


def _park(lives: dict[str, _Life], b: Walk) -> tuple[dict[str, int], int]:
    """A first column for each tile, apart from those of tiles that are needed at the same time; and columns in all."""
    homes: dict[str, tuple[int, int]] = {}
    for tile, life in sorted(lives.items(), key=lambda kv: (kv[1].born, kv[0])):
        width = ceil_to(b.features[tile], 8)
        there = sorted(homes[t] for t in homes if not lives[t].free_for(life.born))
        at = 0
        for first, end in there:
            if at + width <= first:
                break
            at = max(at, end)
        homes[tile] = (at, at + width)
    return {t: first for t, (first, _) in homes.items()}, max((end for _, end in homes.values()), default=0)


def _mistaken(b: Walk) -> set[str]:
    """Operands of a loop in as many registers as its chunks: ptxas (of CUDA 13.0) takes the two for one, and the first
    turn overwrites what the others need."""
    found: set[str] = set()
    for loop in b.loops:
        for draft in b.drafts[loop.first : loop.last + 1]:
            operands = draft.linear.ins if draft.linear is not None else ()
            found |= {t for t in operands if ceil_to(b.features[t], 16) == ceil_to(loop.chunk, 16)}
    return found


def _lives(b: Walk) -> dict[str, _Life]:
    products: dict[str, list[int]] = {}
    reads: dict[str, list[int]] = {}
    for k, draft in enumerate(b.drafts):
        if draft.linear is not None:
            for part in draft.linear.ins:
                products.setdefault(b.views.get(part, (part, 0))[0], []).append(k)
        for node in draft.nodes:
            for i in node.ins:
                base = b.views.get(i, (i, 0))[0]
                if b.step_of.get(base, k) < k or base in b.cats:
                    reads.setdefault(base, []).append(k)
    lives = {}
    for tile in {**products, **reads}:
        if tile in b.streams or tile in b.rows or tile not in b.step_of:
            continue
        born = b.step_of[tile]
        if tile in b.cats:
            born = min(b.made_by(p) for p in b.parts(tile))
        uses = products.get(tile, [])
        # What a loop uses, it uses again in its next turn.
        uses = uses + [loop.sums for loop in b.loops if not set(loop.steps).isdisjoint(uses)]
        lives[tile] = _Life(tile, born, tuple(uses), tuple(reads.get(tile, ())))
    return lives


def _check_chunks(b: Walk, lives: dict[str, _Life], in_registers: set[str]) -> None:
    for tile, layer in b.layers.items():
        if tile in lives and tile not in in_registers:
            raise VerifyError(
                f"the hidden layer at {layer.ops[0].source or b.stage.name} is taken by chunks of {b.chunk_of(tile)}"
                f" columns, and tile {tile!r} ({b.tiles[tile].dtype}) has no place in registers",
                "use smaller chunks, or leave the layer to Inductor",
            )


def _pressure(b: Walk, lives: dict[str, _Life], chosen: set[str]) -> tuple[int, list[str]]:
    """Registers of the worst step, and the tiles that could leave it."""
    worst, crowd = 0, []
    row_registers = 2 * min(len(b.rows), 6)
    overhead = OVERHEAD if len(b.pipeline.stages) == 1 else OVERHEAD_WITH_QUEUES
    sums = {loop.sums for loop in b.loops}
    for k, draft in enumerate(b.drafts):
        columns = share(draft.features, b.stage.placement.dim)
        fragment = 0 if any(n.kind in ("copy", "load") for n in draft.nodes) else ceil_to(columns, 8) // 2
        live = [t for t in chosen if lives[t].born < k <= lives[t].last]
        rows = row_registers
        loop = next((loop for loop in b.loops if loop.first <= k <= loop.last), None)
        if loop is not None:  # a chunk and the sum; what the turn before has made may still be read
            fragment = (loop.chunk + ceil_to(b.drafts[loop.sums].features, 8)) // 2
            live = [t for t in chosen if lives[t].born <= loop.last and lives[t].last >= loop.sums]
            rows = 2 * _rows_across(b, loop)
        elif k in sums:  # the loop is over: its operands and its chunks are dead
            live = [t for t in live if lives[t].last > k]
        total = fragment + sum(ceil_to(b.chunk_of(t), 16) // 4 for t in live) + rows + overhead
        if total > worst:
            worst, crowd = total, live
    return worst, crowd


def _gives_way(old: _Life, new: _Life, in_place: Collection[tuple[str, str]]) -> bool:
    return old.free_for(new.born) or ((old.tile, new.tile) in in_place and old.last == new.born)


def _rows_across(b: Walk, loop: ColumnLoop) -> int:
    """Row values that are made before the loop and used behind it."""
    before = {t for t in b.rows if b.step_of[t] < loop.first}
    return len({i for draft in b.drafts[loop.sums :] for node in draft.nodes for i in node.ins} & before)


def _colour(
    lives: dict[str, _Life], b: Walk, multiple: int, in_place: Collection[tuple[str, str]] = ()
) -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
    """Give tiles of equal dtype and width one place after another; in order of birth."""
    homes: dict[str, int] = {}
    kinds: list[tuple[str, int]] = []
    tenants: list[list[_Life]] = []
    for tile, life in sorted(lives.items(), key=lambda kv: (kv[1].born, kv[0])):
        kind = b.stored(tile), ceil_to(b.chunk_of(tile), multiple)
        for k, there in enumerate(tenants):
            if kinds[k] == kind and all(_gives_way(t, life, in_place) for t in there):
                homes[tile] = k
                there.append(life)
                break
        else:
            homes[tile] = len(kinds)
            kinds.append(kind)
            tenants.append([life])
    return homes, tuple(kinds)
