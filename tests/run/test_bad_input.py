"""Bad input, end to end: a typed error with its remedy, or an announced fallback; never a wrong result in silence."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import chain, edge_block
from samples import spatial, vertical
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from tilestream import cuda, devices
from tilestream.cli.main import app
from tilestream.cuda import cache, compile, driver
from tilestream.cuda.launch import CompiledPipeline
from tilestream.cuda.one_launch import Launch
from tilestream.errors import CompileError, DeviceError, InputError, OptionError, QueueTimeout, TilestreamError
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.families import kernel_of
from tilestream.kernels.stream.emit import emit
from tilestream.options import Options
from tilestream.run import backend
from tilestream.run.backend import tilestream
from tilestream.run.executable import Executable
from tilestream.run.target import Target, resolve

H200 = devices.get("h200")


pytestmark = pytest.mark.usefixtures("fresh")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 5)).bfloat16()


def error_of(call: Callable[[], Any]) -> TilestreamError:
    """What a user's call raises, out of torch.compile's wrapping; it has a cause and a remedy."""
    with torch.no_grad(), pytest.raises(Exception) as caught:
        call()
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, TilestreamError), inner
    assert inner.cause and inner.remedy
    return inner


# ---- options


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"options": {"stratgy": "bulk"}}, "did you mean 'strategy'"),
        ({"options": {"strategy": "clusters"}}, "use one of: auto, bulk, vertical, spatial"),
        ({"options": {"queue_depth": 4, "strategy": "bulk"}}, "contradicts strategy='bulk'"),
        ({"options": {"cache": False, "cache_dir": "here"}}, "cache=False contradicts cache_dir"),
        ({"options": {"queue_depth": 7}}, "not an even number"),
        ({"mode": "max-autotuned"}, "mode='max-autotuned' is not known. Remedy: use 'max-autotune'"),
    ],
)
def test_options(given: dict[str, Any], says: str):
    error = error_of(lambda: torch.compile(model(), backend=tilestream, **given)(torch.randn(3, 9).bfloat16()))
    assert isinstance(error, OptionError) and says in str(error)


# ---- devices


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """Makes tensors on a GPU of a kind of one's own, as torch would describe it."""
    made = SimpleNamespace(name="NVIDIA H200", capability=(9, 0), sms=132)

    def properties(_: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=made.name,
            major=made.capability[0],
            minor=made.capability[1],
            multi_processor_count=made.sms,
            L2_cache_size=50 << 20,
            total_memory=80 << 30,
            shared_memory_per_block_optin=232_448,
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: made.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: made.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def tensor(index: int = 0, **changes: Any) -> Tensor:
        for name, value in changes.items():
            setattr(made, name, value)
        with FakeTensorMode():
            return torch.empty(64, 9, device=f"cuda:{index}")

    yield tensor


def test_kernels_for_tensors_on_the_cpu():
    error = error_of(
        lambda: torch.compile(model(), backend=tilestream, options={"target": "cuda"})(torch.randn(3, 9).bfloat16())
    )
    assert isinstance(error, DeviceError)
    assert "the model's tensors are on the CPU" in error.cause and "target='reference'" in error.remedy


def test_a_gpu_before_hopper(fake_gpu: Callable[..., Tensor]):
    x = fake_gpu(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), sms=108)
    for target in ("cuda", "auto"):
        with pytest.raises(DeviceError, match="NVIDIA A100-SXM4-80GB is sm_80, and kernels need sm_90. Remedy: use an"):
            resolve(Options(target=target), [x])
    assert "sm_80" in cuda.available()
    with pytest.raises(DeviceError, match="sm_80"):
        cuda.build(chain(1, 16))


def test_a_gpu_after_hopper(fake_gpu: Callable[..., Tensor]):
    with pytest.raises(DeviceError, match="is sm_100, and kernels need sm_90"):
        resolve(Options(), [fake_gpu(name="NVIDIA B200", capability=(10, 0), sms=148)])


def test_tensors_on_two_devices(fake_gpu: Callable[..., Tensor]):
    with pytest.raises(DeviceError, match="the model's tensors are on cuda:0 and cuda:1. Remedy: move"):
        resolve(Options(), [fake_gpu(), fake_gpu(1)])


def test_indices_on_the_cpu_beside_tensors_on_the_gpu(fake_gpu: Callable[..., Tensor]):
    target = resolve(Options(), [torch.arange(3), fake_gpu()])
    assert target is not None and target.device == torch.device("cuda:0")


def test_a_gpu_with_fewer_sms_is_planned_for_as_it_is(fake_gpu: Callable[..., Tensor]):
    target = resolve(Options(), [fake_gpu(name="NVIDIA H100 PCIe", sms=114)])
    assert target is not None and target.hardware.sms == 114
    from tilestream.plan.planner import plan

    for candidate in plan(chain(4), 65536, target.hardware, Options()).candidates:
        for launch in cut_at_dram(candidate.pipeline) if candidate.pipeline else ():
            assert sum(s.replicas for s in launch.stages) <= 114


def test_a_named_device_larger_than_the_gpu_present(fake_gpu: Callable[..., Tensor]):
    x = fake_gpu(name="NVIDIA H100 PCIe", sms=114)
    with pytest.raises(
        DeviceError, match="'h200' has 132 SMs, the GPU present 114.*Remedy: leave the device option out"
    ):
        resolve(Options(device="h200"), [x])


class Loaded:
    """A kernel on a GPU that holds one CTA an SM, or none."""

    room = 1

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, cluster: int) -> None:
        self.name = name

    def blocks_per_sm(self, threads: int) -> int:
        return self.room


@pytest.mark.parametrize(
    ("make", "sms", "room", "says"),
    [
        (spatial, 8, 1, "= 16 CTAs at once and this GPU holds 8. Remedy: plan for this GPU"),
        (spatial, 132, 0, "= 16 CTAs at once and this GPU holds 0"),
        (vertical, 132, 0, "does not fit an SM of this GPU. Remedy: plan for this GPU"),
    ],
)
def test_a_pipeline_planned_for_more_sms(
    fake_gpu: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Pipeline],
    sms: int,
    room: int,
    says: str,
):
    """Nothing is launched: stages that wait for each other must all be resident."""
    fake_gpu(sms=sms)
    monkeypatch.setattr(driver, "ensure_context", lambda _: None)
    monkeypatch.setattr(driver, "Function", Loaded)
    monkeypatch.setattr(Loaded, "room", room)
    source = emit(make())
    report = compile.KernelReport(source.name, b"", 168, 0, 0, source.shared_bytes, 0.0, "")
    with pytest.raises(DeviceError, match=says):
        Launch(kernel_of(source.pipeline), source, report, torch.device("cuda", 0))


def test_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA GPU is visible to torch. Remedy: use target='reference'"):
        cuda.build(chain(1, 16))


# ---- tensors given to a pipeline by hand


def given(pipeline: Pipeline, rows: int = 65) -> dict[str, Tensor]:
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    return {
        t.name: torch.randn((rows, t.features) if t.role is Role.INPUT else t.shape).to(dtypes[t.dtype])
        for t in pipeline.tensors
        if t.role is not Role.OUTPUT
    }


OUT = edge_block().by_role(Role.OUTPUT)[0].name
WEIGHT = next(t.name for t in edge_block().tensors if t.shape == (128, 384))


@pytest.fixture
def checked() -> CompiledPipeline:
    """Checks what it is given as on a GPU, and launches nothing."""
    return CompiledPipeline(edge_block(), [], torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("e"), "tensor 'e' is missing. Remedy: give every input and parameter"),
        (lambda t: t.update(e=t["e"].float()), "torch.float32 on cpu; the pipeline wants .65, 128. torch.bfloat16"),
        (lambda t: t.update(e=t["e"].half()), "torch.float16"),
        (lambda t: t.update(a=t["a"][:64]), r"\(64, 128\).*wants \(65, 128\)"),
        (lambda t: t.update(a=t["a"][:, :127]), r"\(65, 127\)"),
        (lambda t: t.update(a=t["a"].to("meta")), "on meta"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].t()}), r"\(384, 128\).*wants \(128, 384\)"),
    ],
)
def test_tensors_that_do_not_fit(checked: CompiledPipeline, change: Callable[[dict], Any], says: str):
    tensors = given(checked.pipeline)
    assert checked(tensors, 65)[OUT].shape == (65, 128)
    change(tensors)
    with pytest.raises(InputError, match=says):
        checked(tensors, 65)


def test_outputs_that_alias_inputs(checked: CompiledPipeline):
    tensors = given(checked.pipeline)
    out = torch.empty(65, 128, dtype=torch.bfloat16)
    assert checked(tensors, 65, out={OUT: out})[OUT] is out
    for name, part in (("e", tensors["e"]), (WEIGHT, tensors[WEIGHT].view(-1)[: 65 * 128].view(65, 128))):
        with pytest.raises(InputError, match=f"output '{OUT}' shares memory with '{name}'. Remedy: give it memory"):
            checked(tensors, 65, out={OUT: part})
    room = torch.zeros(66 * 128, dtype=torch.bfloat16)
    tensors["b"] = room[: 65 * 128].view(65, 128)
    with pytest.raises(InputError, match="shares memory with 'b'"):
        checked(tensors, 65, out={OUT: room[128:].view(65, 128)})


def test_outputs_that_kernels_cannot_write(checked: CompiledPipeline):
    tensors = given(checked.pipeline)
    room = torch.zeros(65 * 128 + 1, dtype=torch.bfloat16)
    for bad in (room[1:].view(65, 128), room[:-1].view(128, 65).t(), torch.zeros(1, 128).bfloat16().expand(65, 128)):
        with pytest.raises(InputError, match=f"kernels cannot write output '{OUT}'.*Remedy: give a contiguous tensor"):
            checked(tensors, 65, out={OUT: bad})


# ---- NVRTC


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch):
    """The bindings are not installed."""
    package = importlib.import_module("cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    if hasattr(package, "nvrtc"):
        monkeypatch.delattr(package, "nvrtc")
    cache.forget()
    compile.compiler_version.cache_clear()
    yield
    compile.compiler_version.cache_clear()


def test_no_nvrtc(no_nvrtc: None):
    assert compile.compiler_version() == "none"
    with pytest.raises(CompileError, match=r"bindings are missing .*Remedy: pip install 'tilestream\[cuda\]'"):
        cuda.compile_only(chain(1, 16))


def test_nvrtc_bindings_without_the_library(monkeypatch: pytest.MonkeyPatch):
    from cuda.bindings import nvrtc

    def missing(*_: Any) -> Any:
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", missing)
    with pytest.raises(CompileError, match="cannot be loaded .*libnvrtc.so.13.*Remedy: pip install nvidia-cuda-nvrtc"):
        compile.compile_split(emit(chain(1, 16)), 0)


@pytest.fixture
def kernels_are_built(monkeypatch: pytest.MonkeyPatch):
    """Regions are compiled as on an H200, as far as that goes without one."""

    def build(pipeline: Pipeline, device: torch.device, dependent: bool) -> Executable:
        cuda.compile_only(pipeline)
        raise AssertionError("there is no GPU to run it")

    monkeypatch.setattr(cuda, "build", build)
    monkeypatch.setattr(backend, "resolve", lambda *_: Target("cuda", torch.device("cpu"), H200))


def test_without_nvrtc_the_model_runs_on_inductor_and_says_so(
    no_nvrtc: None, kernels_are_built: None, caplog: pytest.LogCaptureFixture
):
    module, x = model(), torch.randn(70, 9).bfloat16()
    fast = torch.compile(module, backend=tilestream, options={"measure": False, "strategy": "vertical"})
    with caplog.at_level(logging.WARNING, "tilestream"), torch.no_grad():
        torch.testing.assert_close(fast(x), module(x), rtol=0.02, atol=0.02)
        fast(x)
    said = [r.getMessage() for r in caplog.records if "goes to Inductor" in r.getMessage()]
    assert len(said) == 1 and "pip install 'tilestream[cuda]'" in said[0] and "region0" in said[0]


def test_without_nvrtc_and_without_fallback_it_is_an_error(no_nvrtc: None, kernels_are_built: None):
    options = {"measure": False, "strategy": "vertical", "fallback": False}
    fast = torch.compile(model(), backend=tilestream, options=options)
    assert isinstance(error_of(lambda: fast(torch.randn(70, 9).bfloat16())), CompileError)


def test_a_kernel_that_nvrtc_refuses():
    with pytest.raises(CompileError, match="(?s)NVRTC refused kernel broken: .*Remedy: report this"):
        compile.compile_text("this is no C++", "broken", 0)


# ---- a timeout is told before anything else


def test_after_a_timeout_every_call_says_so():
    class Expired(Launch):
        def __init__(self) -> None:
            self.kernel = kernel_of(chain(1, 16))

        def check(self) -> None:
            raise QueueTimeout("stage 'a' waited too long", "restart the process")

    lost = CompiledPipeline(chain(1, 16), [Expired()], torch.device("cpu"))
    with pytest.raises(QueueTimeout):
        lost({}, 65)


# ---- the command line


def test_a_full_disk_under_json():
    done = CliRunner().invoke(app, ["explain", "chain", "--device", "h200", "--json", "/dev/full"])
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr and "Traceback" not in done.output


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("TILESTREAM_CACHE_DIR", "/proc/no/such/folder")
    with caplog.at_level(logging.WARNING):
        done = CliRunner().invoke(
            app, ["check", "chain", "--rows", "8", "--target", "reference"], catch_exceptions=False
        )
    assert done.exit_code == 0
    assert caplog.text.count("plans are not kept") == 1
