"""Thin calls into the CUDA driver: modules, tensor maps, launches. Needs a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from tilestream.errors import DeviceError
from tilestream.kernels.parts.tensor_maps import AnyMap, HeadsMap, PixelMap

PORTABLE_CLUSTER = 8  # a larger one must be asked for
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
    """A loaded kernel. ``cluster``: the CTAs of a cluster that it was compiled for."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, cluster: int = 1) -> None:
        d = _driver()
        self._library = check(d.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"loading kernel {name}")
        kernel = check(d.cuLibraryGetKernel(self._library, name.encode()), f"finding kernel {name}")
        self.handle = check(d.cuKernelGetFunction(kernel), f"kernel {name}")
        if shared_bytes:
            attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(
                d.cuFuncSetAttribute(self.handle, attribute, shared_bytes),
                f"{shared_bytes} bytes of shared memory for {name}",
            )
        if cluster > PORTABLE_CLUSTER:
            attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check(d.cuFuncSetAttribute(self.handle, attribute, 1), f"clusters of {cluster} for {name}")
        self.name, self.shared_bytes = name, shared_bytes

    def variable(self, name: str) -> tuple[int, int]:
        """Address and bytes of a variable in device memory that the kernel's source declares."""
        address, size = check(_driver().cuLibraryGetGlobal(self._library, name.encode()), f"variable {name}")
        return int(address), int(size)

    def resident_clusters(self, threads: int, cluster: int) -> int:
        """Clusters of ``cluster`` CTAs that the device holds at once."""
        d = _driver()
        config = _config(self, (cluster, 1), threads)
        size = d.CUlaunchAttribute()
        size.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        config.attrs, config.numAttrs = [size], 1
        return check(d.cuOccupancyMaxActiveClusters(self.handle, config), f"resident clusters of {self.name}")

    def blocks_per_sm(self, threads: int) -> int:
        d = _driver()
        return check(
            d.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.handle, threads, self.shared_bytes), "occupancy"
        )

    def prepare(
        self,
        grid: tuple[int, int],
        threads: int,
        stream: int,
        params: bytes,
        cooperative: bool = False,
        dependent: bool = False,
    ) -> PreparedLaunch:
        """All that a launch needs, ready to be made any number of times.

        Args:
            params: the bytes of the kernel's one by-value argument; the driver copies them at every launch.
            dependent: it may start before the kernel in front of it on the stream has ended.
        """
        kind = DependentLaunch if dependent else PreparedLaunch
        return kind(self, grid, threads, stream, params, cooperative)

    def launch(
        self, grid: tuple[int, int], threads: int, stream: int, params: bytes, cooperative: bool = False
    ) -> None:
        """Enqueue once; arguments as ``prepare``."""
        self.prepare(grid, threads, stream, params, cooperative)()


class PreparedLaunch:
    """Call it to enqueue a kernel with arguments that were settled before."""

    def __init__(
        self, function: Function, grid: tuple[int, int], threads: int, stream: int, params: bytes, cooperative: bool
    ) -> None:
        d = _driver()
        held = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        self._keep = (held, pointers)
        self._function, self._grid, self._threads, self._cooperative = function, grid, threads, cooperative
        self._where = ctypes.addressof(pointers)
        self._launch, self._args = self._call(stream)
        self._success = d.CUresult.CUDA_SUCCESS

    def _call(self, stream: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What the driver is called with to enqueue it on ``stream``."""
        d, function = _driver(), self._function
        one = (function.handle, *self._grid, 1, self._threads, 1, 1, function.shared_bytes, stream, self._where)
        return (d.cuLaunchCooperativeKernel, one) if self._cooperative else (d.cuLaunchKernel, (*one, 0))

    def __call__(self) -> None:
        result = self._launch(*self._args)
        if result[0] != self._success:
            check(result, f"launch of {self._function.name}")

    def add_to(self, graph: Any, after: list[Any]) -> Any:
        """A node of a CUDA graph that makes this launch, once the nodes ``after`` are through."""
        d = _driver()
        node = d.CUDA_KERNEL_NODE_PARAMS()
        node.func = self._function.handle
        node.gridDimX, node.gridDimY, node.gridDimZ = *self._grid, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = self._threads, 1, 1
        node.sharedMemBytes, node.kernelParams = self._function.shared_bytes, self._where
        made = check(d.cuGraphAddKernelNode(graph, after, len(after), node), f"node for {self._function.name}")
        if self._cooperative:
            value = d.CUkernelNodeAttrValue()
            value.cooperative = 1
            attribute = d.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            check(d.cuGraphKernelNodeSetAttribute(made, attribute, value), "cuGraphKernelNodeSetAttribute")
        return made


class Clearing:
    """Zeros for ``words`` of 32 bits at ``address``: call it to enqueue that on ``stream``."""

    def __init__(self, address: int, words: int, stream: int) -> None:
        self._args = (address, 0, words, stream)

    def __call__(self) -> None:
        check(_driver().cuMemsetD32Async(*self._args), "cuMemsetD32Async")

    def add_to(self, graph: Any, after: list[Any]) -> Any:
        """As of ``PreparedLaunch``."""
        d = _driver()
        node = d.CUDA_MEMSET_NODE_PARAMS()
        node.dst, node.value, node.width, _ = self._args
        node.elementSize, node.height, node.pitch = 4, 1, 0
        context = check(d.cuCtxGetCurrent(), "cuCtxGetCurrent")
        return check(d.cuGraphAddMemsetNode(graph, after, len(after), node, context), "cuGraphAddMemsetNode")


class DependentLaunch(PreparedLaunch):
    """A launch whose CTAs start while the kernel before still runs (programmatic dependent launch). A cooperative one
    begins when there is room for all of its CTAs: on an H200 that leaves two thirds of what is gained."""

    def _call(self, stream: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        d = _driver()
        config = _config(self._function, self._grid, self._threads)
        config.hStream = stream
        early = d.CUlaunchAttribute()
        early.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        together = d.CUlaunchAttribute()
        together.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        config.attrs = [early, together] if self._cooperative else [early]
        config.numAttrs = len(config.attrs)
        return d.cuLaunchKernelEx, (config, self._function.handle, self._where, 0)


def _config(function: Function, grid: tuple[int, int], threads: int) -> Any:
    """The shape of a launch, without attributes and on no stream yet."""
    config = _driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = function.shared_bytes
    return config


class LaunchGraph:
    """Launches, one after another, as a CUDA graph: call it to enqueue all of them at once.

    On an H200's host a kernel's launch takes 5 us, and a graph of one or two of them 2.5 us.
    """

    def __init__(self, launches: Sequence[PreparedLaunch | Clearing], stream: int) -> None:
        d = _driver()
        with _outside_captures():
            graph = check(d.cuGraphCreate(0), "cuGraphCreate")
            try:
                after: list[Any] = []
                for launch in launches:
                    after = [launch.add_to(graph, after)]
                executable = check(d.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
            finally:
                d.cuGraphDestroy(graph)
        weakref.finalize(self, _destroy, executable).atexit = False  # the process's end frees it anyway
        self._launch, self._args = d.cuGraphLaunch, (executable, d.CUstream(stream))
        self._success = d.CUresult.CUDA_SUCCESS

    def __call__(self) -> None:
        result = self._launch(*self._args)
        if result[0] is not self._success:
            check(result, "cuGraphLaunch")


def _destroy(executable: Any) -> None:
    """Give an executable graph back, which ends when what it has enqueued does; also during a capture."""
    with _outside_captures():
        _driver().cuGraphExecDestroy(executable)


def capture_number(stream: int) -> int:
    """A number that tells captures into CUDA graphs apart; 0 where ``stream`` is not being captured."""
    d = _driver()
    status, number, *_ = check(d.cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo")
    return int(number) if status == d.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE else 0


def allocate_zeros(size: int) -> int:
    """The address of ``size`` new bytes on the current device, all zero when this returns; also during a capture.

    Raises:
        DeviceError: there is no room, even without the memory that torch keeps for later.
    """
    import torch

    d = _driver()
    with _outside_captures():
        error, address = d.cuMemAlloc(size)
        if error == d.CUresult.CUDA_ERROR_OUT_OF_MEMORY and not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()
            error, address = d.cuMemAlloc(size)
        check((error,), f"{size} bytes of workspace")
        side = check(d.cuStreamCreate(d.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
        check(d.cuMemsetD8Async(address, 0, size, side), "cuMemsetD8Async")
        check(d.cuStreamSynchronize(side), "cuStreamSynchronize")
        check(d.cuStreamDestroy(side), "cuStreamDestroy")
    return int(address)


@contextlib.contextmanager
def _outside_captures() -> Iterator[None]:
    """Allow this thread what a capture forbids; nothing done inside becomes a part of the graph."""
    d = _driver()
    relaxed = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(d.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        d.cuThreadExchangeStreamCaptureMode(before)


def read(address: int, size: int) -> bytearray:
    """``size`` bytes of device memory, once all work that was enqueued before has ended."""
    d = _driver()
    made = bytearray(size)
    check(d.cuMemcpyDtoH(made, address, size), f"reading {size} bytes")
    return made


def free(address: int) -> None:
    """Give memory of ``allocate_zeros`` back; also during a capture."""
    with _outside_captures():
        _driver().cuMemFree(address)


@lru_cache(maxsize=4096)
def encoded(m: AnyMap) -> bytes:
    """The bytes of a tensor map for kernels on a GPU. Cached: a module's weights keep their addresses.

    Raises:
        DeviceError: an address or a distance of rows is no multiple of 16, or the driver refuses it.
    """
    d = _driver()
    element = 4 if m.dtype in ("f32", "tf32") else 2
    type_, swizzles = getattr(d.CUtensorMapDataType, _TYPES[m.dtype]), d.CUtensorMapSwizzle
    whole = (
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    apart = d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B
    if isinstance(m, PixelMap):
        channels, width, height, _ = m.sizes
        bytes_of = [channels * element, channels * width * element, channels * width * height * element]
        made = d.cuTensorMapEncodeIm2col(
            type_,
            4,
            m.address,
            [d.cuuint64_t(n) for n in m.sizes],
            [d.cuuint64_t(n) for n in bytes_of],
            list(m.begin),
            list(m.end),
            d.cuuint32_t(128 // element),
            d.cuuint32_t(m.pixels),
            [d.cuuint32_t(n) for n in (1, *m.strides, 1)],
            apart,
            swizzle,
            *whole,
        )
        what = f"pictures {m.sizes} {m.dtype}"
    else:
        if isinstance(m, HeadsMap):
            what = f"heads {m.sizes} {m.dtype}"
            sizes, strides, box = m.sizes, m.strides, (128 // element, m.box_rows, 1, 1)
        else:
            what = f"{m.rows} x {m.columns} {m.dtype}"
            sizes, strides, box = (m.columns, m.rows), (m.row_bytes,), (m.box_columns or 128 // element, m.box_rows)
            for said, size in (("it starts at byte", m.address), ("its rows are so many bytes apart:", m.row_bytes)):
                if size % 16:
                    raise DeviceError(
                        f"tensor map of {what}: {said} {size} = 16 x {size // 16} + {size % 16}, and bulk"
                        " copies start on multiples of 16",
                        "report it with the pipeline",
                    )
        made = d.cuTensorMapEncodeTiled(
            type_,
            len(sizes),
            m.address,
            [d.cuuint64_t(n) for n in sizes],
            [d.cuuint64_t(n) for n in strides],
            [d.cuuint32_t(n) for n in box],
            [d.cuuint32_t(1)] * len(sizes),
            apart,
            swizzle if box[0] * element == 128 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            *whole,
        )
    words = check(made, f"tensor map of {what}").opaque
    return b"".join(int(word).to_bytes(8, "little") for word in words)
