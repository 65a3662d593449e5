"""Where a node comes from: the user's line, and the module."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_LOCAL = re.compile(r"^L\[[^\]]*\]")
_SUBSCRIPT = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_RECORDING = tuple(str(Path(__file__).parent / name) for name in ("capture.py", "eager.py"))
OTHERS = (str(Path(torch.__file__).parent), *_RECORDING)
"""Code between the user and the graph: torch's, and what records for analysis."""


def source(node: fx.Node) -> str:
    """The user's line that made ``node``: ``file.py:12 in forward: code``, or an empty string.

    The last frame outside torch's own code, since ``torch.nn`` modules call functions of their own.
    """
    return _line(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _line(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    own = [f for f in frames if not f["file"].startswith(OTHERS)]
    own = own or [f for f in frames if f["file"] not in _RECORDING]
    if not own:
        return ""
    frame = own[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {function(frame['function'])}: {frame['code'].strip()}"


def function(name: str) -> str:
    """The user's name of a function that Dynamo resumes in the middle."""
    return _RESUMED.sub(r"\1", name.strip())


def module_path(node: fx.Node) -> str:
    """The module that made ``node``, or whose gradient it is: ``blocks.0.norm``; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return _SUBSCRIPT.sub(r".\1", _LOCAL.sub("", path)).lstrip(".")
