"""Which nodes of a graph wait for each other in a circle."""

from __future__ import annotations

from tilestream.errors import StreamDeadlock
from tilestream.sparse.engine import layout as at
from tilestream.sparse.engine.machine import Machine


def deadlock(machine: Machine) -> StreamDeadlock:
    """The error that names the cycle. Every node that has not finished waits at one channel, so that there is one."""
    nodes = machine.nodes
    index = next(i for i in range(len(nodes)) if nodes[i, at.WAITING] != at.FINISHED)
    path: list[int] = []
    steps: list[str] = []
    while index not in path and nodes[index, at.WAITING] in (at.ON_INPUT, at.ON_ROOM):
        path.append(index)
        channel = machine.channel_at(int(nodes[index, at.WAIT_CHANNEL]))
        row = machine.channels[channel]
        name, stream = machine.graph.nodes[index].name, machine.ports[channel]
        if nodes[index, at.WAITING] == at.ON_INPUT:
            steps.append(f"{name} waits for a token of {stream}")
            index = machine.node_at(int(row[at.WRITER]))
        else:
            slots = int(row[at.CAPACITY])
            index = machine.node_at(int(row[at.READER]))
            held = f"{slots} slot{'s' if slots > 1 else ''}, read by {machine.graph.nodes[index].name}"
            steps.append(f"{name} waits for room in {stream} ({held})")
    cycle = steps[path.index(index) :] if index in path else [*steps, f"{machine.graph.nodes[index].name} has ended"]
    return StreamDeadlock(
        f"graph {machine.graph.name!r} cannot go on with channels of this depth: {'; '.join(cycle)}",
        "use deeper channels, at least for the streams named",
    )
