"""Thin calls into the CUDA driver: modules, tensor maps, launches. Needs a GPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from tilestream.errors import DeviceError

MAP_BYTES = 128
_TYPES = {
    "bf16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "f16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "f32": "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    "tf32": "CU_TENSOR_MAP_DATA_TYPE_TFLOAT32",  # rounds on the way in; the products would truncate
}


@lru_cache(maxsize=1)
def _driver():
    try:
        import cuda.bindings.driver as driver
    except ImportError as e:
        raise DeviceError(f"cuda-bindings are missing ({e})", "pip install 'tilestream[cuda]'") from e
    return driver


def check(result, what: str) -> Any:
    """Unpack a driver call's result.

    Raises:
        DeviceError: with the driver's name for the error.
    """
    err, *values = result
    if err != _driver().CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what} failed: {err.name}", "run under compute-sanitizer; report it with the pipeline")
    return values[0] if len(values) == 1 else values


def ensure_context(device_index: int) -> None:
    """Make torch's primary context current on this thread, as torch itself does lazily."""
    d = _driver()
    current = check(d.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(current) == 0:
        context = check(d.cuDevicePrimaryCtxRetain(d.CUdevice(device_index)), "cuDevicePrimaryCtxRetain")
        check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Function:
    """A loaded kernel."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        d = _driver()
        self._library = check(d.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"loading kernel {name}")
        kernel = check(d.cuLibraryGetKernel(self._library, name.encode()), f"finding kernel {name}")
        self._handle = check(d.cuKernelGetFunction(kernel), f"kernel {name}")
        if shared_bytes:
            attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(
                d.cuFuncSetAttribute(self._handle, attribute, shared_bytes),
                f"{shared_bytes} bytes of shared memory for {name}",
            )
        self.name, self.shared_bytes = name, shared_bytes

    def blocks_per_sm(self, threads: int) -> int:
        d = _driver()
        return check(
            d.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._handle, threads, self.shared_bytes), "occupancy"
        )

    def launch(
        self, grid: tuple[int, int], threads: int, stream: int, params: ctypes.Array, cooperative: bool = False
    ) -> None:
        """``params``: the bytes of the kernel's one by-value argument."""
        d = _driver()
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        where = ctypes.addressof(pointers)
        if cooperative:
            result = d.cuLaunchCooperativeKernel(
                self._handle, grid[0], grid[1], 1, threads, 1, 1, self.shared_bytes, stream, where
            )
        else:
            result = d.cuLaunchKernel(
                self._handle, grid[0], grid[1], 1, threads, 1, 1, self.shared_bytes, stream, where, 0
            )
        check(result, f"launch of {self.name}")


@lru_cache(maxsize=4096)
def tensor_map(dtype: str, address: int, columns: int, rows: int, row_bytes: int, box_rows: int) -> bytes:
    """A 2-D tensor map with boxes of ``box_rows`` x 128 bytes, 128-byte swizzle, zero fill outside.

    ``address`` and ``row_bytes`` are multiples of 16. Cached: a module's weights keep their addresses.
    """
    d = _driver()
    element = 4 if dtype in ("f32", "tf32") else 2
    encoded = check(
        d.cuTensorMapEncodeTiled(
            getattr(d.CUtensorMapDataType, _TYPES[dtype]),
            2,
            address,
            [d.cuuint64_t(columns), d.cuuint64_t(rows)],
            [d.cuuint64_t(row_bytes)],
            [d.cuuint32_t(128 // element), d.cuuint32_t(box_rows)],
            [d.cuuint32_t(1), d.cuuint32_t(1)],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"tensor map of {rows} x {columns} {dtype}",
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)
