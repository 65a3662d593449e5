"""What NVRTC is given to write into: never an object that the rest of Python shares."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from tilestream.cuda import compile as compiler

NVRTC = SimpleNamespace(nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0))


@pytest.mark.parametrize("written", [b"\0", b"a\0", b"a log\0"])
def test_bytes_that_python_shares_are_not_written_to(written: bytes) -> None:
    """An empty log has one byte, and Python has one object for each bytes of length one."""
    shared = {id(bytes([n])) for n in range(256)}
    given: list[bytes] = []

    def get(program: object, data: bytes) -> tuple[int]:
        given.append(data)
        assert id(data) not in shared
        ctypes.memmove(ctypes.c_char_p(data), written, len(written))
        return (0,)

    assert compiler._bytes(NVRTC, lambda _: (0, len(written)), get, None) == written
    assert len(given) == 1


def test_a_log_ends_with_its_text() -> None:
    def get(program: object, data: bytes) -> tuple[int]:
        ctypes.memmove(ctypes.c_char_p(data), b"two words \0", 11)
        return (0,)

    assert compiler._text(NVRTC, lambda _: (0, 11), get, None) == "two words"
