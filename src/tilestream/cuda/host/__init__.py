"""Generated kernels as threads of this machine: the same source against a host twin of the primitives."""

from tilestream.cuda.host.build import HostRun, run_on_host

__all__ = ["HostRun", "run_on_host"]
