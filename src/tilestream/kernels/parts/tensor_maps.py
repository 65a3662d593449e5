"""What encodes tensor maps: the driver, or the host build for its own copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class MakeMap(Protocol):
    """``driver.tensor_map``, or what the host build reads as one."""

    def __call__(
        self, dtype: str, address: int, columns: int, rows: int, row_bytes: int, box_rows: int, box_columns: int = 0, /
    ) -> bytes: ...


class MakePixelMap(Protocol):
    """``driver.pixel_map``, or what the host build reads as one."""

    def __call__(
        self,
        dtype: str,
        address: int,
        sizes: tuple[int, int, int, int],
        begin: tuple[int, int],
        end: tuple[int, int],
        strides: tuple[int, int],
        pixels: int,
        /,
    ) -> bytes: ...


@dataclass(frozen=True)
class Maps:
    """Maps of matrices, and of pictures."""

    matrix: MakeMap
    pixels: MakePixelMap
