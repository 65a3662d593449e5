"""The reference machine: a Pipeline executed tile by tile on the CPU, with real bounded queues.

It is the meaning of the IR and the oracle of the generated kernels. ``ops`` says what each tile op
computes, ``ring`` what a queue is, ``machine`` who advances when, ``inputs`` what may be given.
"""

from tilestream.reference.machine import run

__all__ = ["run"]
