"""A test that loses the CUDA context ends its worker process, so that the tests behind it get another one."""

from __future__ import annotations

import os

import pytest

LEFT = 3
"""The exit code of such a worker."""


def is_lost() -> bool:
    """Whether nothing more can run on the GPU in this process."""
    import torch  # not by those who only ask whether a worker would end: it takes seconds

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def leave_if_lost(item: pytest.Item, report: pytest.TestReport) -> None:
    """End a worker of xdist, which counts the test as failed and starts another; say first how it failed.

    Elsewhere, and with ``--dist loadgroup``, which waits for ever for a worker that ended, the tests behind it fail at
    once, naming it (``gpu/conftest.py``).
    """
    command = getattr(item.config, "workerinput", {}).get("mainargv", ["loadgroup"])
    if any("loadgroup" in word for word in command) or item.get_closest_marker("gpu") is None:
        return
    if not (report.failed and is_lost()):
        return
    if (captured := item.config.pluginmanager.getplugin("capturemanager")) is not None:
        captured.suspend_global_capture(in_=True)
    os.write(2, f"{item.nodeid} lost the CUDA context:\n{report.longreprtext}\n".encode())
    os._exit(LEFT)
