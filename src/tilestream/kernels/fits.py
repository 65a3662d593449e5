"""Whether a legal pipeline fits a device: its SMs, what one CTA has, its L2."""

from __future__ import annotations

from collections.abc import Callable

from tilestream.devices import Device
from tilestream.errors import VerifyError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Residency, Transport
from tilestream.ir.verify import named, verify
from tilestream.kernels.families import footprint, kernel_of

REGISTERS_PER_THREAD = 255


def verify_on(pipeline: Pipeline, device: Device) -> None:
    """Check that ``pipeline`` is legal, and that each of its launches fits ``device``.

    Raises:
        VerifyError: the first rule that is broken, with the numbers, the user's line and a remedy.
    """
    verify(pipeline)
    for launch in cut_at_dram(pipeline):
        for rule in DEVICE_RULES:
            rule(launch, device)


def replicas_fit_sms(launch: Pipeline, device: Device) -> None:
    """All replicas of a launch are resident together, one CTA an SM."""
    total = sum(s.replicas for s in launch.stages)
    if total > device.sms:
        parts = " + ".join(f"{s.name} {s.replicas}" for s in launch.stages)
        raise VerifyError(
            f"launch {launch.name!r} needs {parts} = {total} > {device.sms} SMs of {device.name}", "use fewer replicas"
        )


def stages_fit_sm(launch: Pipeline, device: Device) -> None:
    """Registers and shared memory of every stage fit one CTA."""
    for stage in launch.stages:
        need = footprint(stage, launch, device.shared_bytes_per_cta)
        if need.shared_bytes > device.shared_bytes_per_cta:
            parts = " + ".join(f"{name} {size}" for name, size in need.parts if size)
            raise VerifyError(
                f"{named(stage)} needs {parts} = {need.shared_bytes} > {device.shared_bytes_per_cta}"
                f" bytes of shared memory on {device.name}",
                "stream its weights" if stage.residency is Residency.RESIDENT else "split it into several stages",
            )
        if need.registers > REGISTERS_PER_THREAD:
            raise VerifyError(
                f"{named(stage)} needs {need.registers} > {REGISTERS_PER_THREAD} registers a thread",
                "split it into several stages, or use Shard(1)",
            )


def clusters_are_resident(launch: Pipeline, device: Device) -> None:
    """All clusters that wait for each other are on the device at once."""
    clusters, size = kernel_of(launch).clusters(device.shared_bytes_per_cta)
    room = device.resident_clusters(size) if size <= device.largest_cluster else 0
    if clusters > room:
        raise VerifyError(
            f"{named(launch.stages[0])} needs {clusters * size} / {size} = {clusters} clusters of {size} >"
            f" {room} that {device.name} holds at once",
            "use fewer columns, or groups through the L2",
        )


def rings_fit_l2(launch: Pipeline, device: Device) -> None:
    """All rings of a launch together fit the L2: past it, they would spill to DRAM."""
    tiles = launch.tiles()
    queues = [q for q in launch.queues if q.transport is Transport.L2]
    rings = [(q.tile, q.depth, launch.tile_rows * tiles[q.tile].row_bytes) for q in queues]
    total = sum(depth * size for _, depth, size in rings)
    if total > device.l2_bytes:
        parts = " + ".join(f"{name} {depth} x {size}" for name, depth, size in rings)
        raise VerifyError(
            f"the rings of launch {launch.name!r} take {parts} = {total} > {device.l2_bytes}"
            f" bytes of L2 on {device.name}",
            "use less depth or fewer replicas",
        )


DEVICE_RULES: tuple[Callable[[Pipeline, Device], None], ...] = (
    replicas_fit_sms,
    stages_fit_sm,
    clusters_are_resident,
    rings_fit_l2,
)
