"""The grid scheduler: which CTA goes to which SM.

As GPUs are: one arbiter hands out CTAs in the order of the stages, round-robin over the SMs that have room. With two
arbiters (Kitsune 2.3) tensor and SIMT CTAs go round the SMs apart, so that one of each meets on an SM.
"""

from __future__ import annotations

from tilestream.devices import Device
from tilestream.errors import DeviceError, WorkloadError
from tilestream.simulator.workload import SimLaunch, SimStage

Placement = tuple[tuple[int, ...], ...]
"""SM of every CTA, stage after stage; -1 for CTAs that come in later waves (of a single stage)."""


def per_sm(stage: SimStage, device: Device) -> int:
    """CTAs of ``stage`` that fit on one SM.

    Raises:
        WorkloadError: not even one does; says which number is too large.
    """
    for what, need, most in (
        ("registers", stage.registers, device.registers_per_sm),
        ("bytes of shared memory", stage.shared_bytes, device.shared_bytes_per_cta),
    ):
        if need > most:
            raise WorkloadError(
                f"a CTA of stage {stage.name!r} needs {need} {what}; {device.name} allows {most}",
                "make its tile smaller, or split the stage",
            )
    fit = device.ctas_per_sm
    if stage.registers:
        fit = min(fit, device.registers_per_sm // stage.registers)
    if stage.shared_bytes:
        fit = min(fit, device.shared_bytes_per_sm // stage.shared_bytes)
    return fit


def place(launch: SimLaunch, device: Device, arbiters: int) -> Placement:
    """Place the CTAs of ``launch``.

    Raises:
        WorkloadError: stages that run together do not all fit on the device at once.
    """
    _check_clusters(launch, device)
    fits = [per_sm(stage, device) for stage in launch.stages]
    if len(launch.stages) == 1:
        stage = launch.stages[0]
        return (tuple(i % device.sms if i < fits[0] * device.sms else -1 for i in range(stage.ctas)),)
    room = _Room(device)
    pointers: dict[str, int] = {"tensor": 0, "simt": 0, "any": 0}
    placed = []
    for stage in launch.stages:
        pointer = str(stage.engine) if arbiters == 2 else "any"
        sms = []
        for _ in range(stage.ctas):
            sm = room.next(stage, pointers[pointer])
            if sm < 0:
                fit = sum(map(len, placed)) + len(sms)
                raise WorkloadError(
                    f"launch {launch.name!r} cannot be resident on {device.name}: {fit} of "
                    f"{sum(s.ctas for s in launch.stages)} CTAs fit, then stage {stage.name!r} finds no SM with "
                    f"{stage.registers} registers and {stage.shared_bytes} bytes of shared memory free",
                    "use fewer CTAs, or fewer registers and less shared memory a CTA",
                )
            room.take(stage, sm)
            pointers[pointer] = (sm + 1) % device.sms
            sms.append(sm)
        placed.append(tuple(sms))
    return tuple(placed)


def _check_clusters(launch: SimLaunch, device: Device) -> None:
    """Raise if the clusters that queues ask for do not exist, or are more than are resident at once."""
    ctas = {s.name: s.ctas for s in launch.stages}
    for q in (q for q in launch.queues if q.cluster):
        wanted = sum(ctas[name] for name in {q.producer, *q.consumers})
        try:
            resident = device.resident_clusters(q.cluster)
        except DeviceError as failure:
            raise WorkloadError(f"launch {launch.name!r}: {failure.cause}", failure.remedy) from failure
        if wanted > resident * q.cluster:
            raise WorkloadError(
                f"launch {launch.name!r}: {wanted} CTAs at the queue from {q.producer!r} are "
                f"{wanted / q.cluster:g} clusters of {q.cluster}; {device.name} holds {resident} of that size at once",
                f"use at most {resident * q.cluster} CTAs, or smaller clusters",
            )


class _Room:
    """Registers, shared memory and CTA slots left on each SM."""

    def __init__(self, device: Device) -> None:
        self.registers = [device.registers_per_sm] * device.sms
        self.shared = [device.shared_bytes_per_sm] * device.sms
        self.slots = [device.ctas_per_sm] * device.sms

    def next(self, stage: SimStage, start: int) -> int:
        """The first SM from ``start`` on, round-robin, with room for a CTA; -1 if none has."""
        count = len(self.slots)
        for i in range(count):
            sm = (start + i) % count
            if self.slots[sm] > 0 and self.registers[sm] >= stage.registers and self.shared[sm] >= stage.shared_bytes:
                return sm
        return -1

    def take(self, stage: SimStage, sm: int) -> None:
        self.slots[sm] -= 1
        self.registers[sm] -= stage.registers
        self.shared[sm] -= stage.shared_bytes
