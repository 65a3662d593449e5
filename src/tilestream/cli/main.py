"""``tilestream``: demo, explain, simulate, trace, check, bench, sweep and reproduce from a shell.

Exit codes: 0 done, 1 a result is outside the tolerance, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilestream import files
from tilestream.cli import flashfuser, kitsune
from tilestream.cli.console import out, reported, write_json
from tilestream.cli.grouped import grouped
from tilestream.cli.progress import Progress
from tilestream.cli.runs import planned, refuse_random, rows_to_run, where
from tilestream.cli.sparse import app as sparse
from tilestream.errors import DeviceError, OptionError
from tilestream.options import Options, parse

if TYPE_CHECKING:
    from tilestream.apps.load import Workload
    from tilestream.plan.analysis import Analysis
    from tilestream.report.measured import Measurements
    from tilestream.report.simulation import Simulation

HELP = """Compile PyTorch models to dataflow: explain the plan, check it, predict and measure its time.

Exit codes: 0 done, 1 a result is outside the tolerance, 2 bad input, 130 interrupted."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
Target = Annotated[
    str, typer.Argument(help="A model's name, as nerf, or FILE.py:FUNCTION that returns (module, inputs).")
]
Rows = Annotated[
    int | None, typer.Option(max=kitsune.MOST, help="Rows; for a file, passed to the function's argument rows.")
]
Dtype = Annotated[str | None, typer.Option(help="bf16, f16 or f32. Named models default to bf16.")]
Strategy = Annotated[str, typer.Option(help="auto, bulk, vertical, spatial or shared.")]
Device = Annotated[str | None, typer.Option(help="Plan for this device, as h200 or a100, present or not.")]
RunOn = Annotated[str, typer.Option("--target", help="What runs the pipelines: auto, cuda or reference.")]
Depth = Annotated[int | None, typer.Option(help="Tiles in every L2 queue; even.")]
Step = Annotated[bool, typer.Option("--decode-step/--no-decode-step", help="A decode step as one kernel, if faster.")]
Cache = Annotated[bool, typer.Option(help="Keep plans and kernels on disk.")]
Mode = Annotated[str, typer.Option(help="inference, or training: forward and backward graphs.")]
Size = Annotated[list[str] | None, typer.Option(help="NAME=VALUE: a size of a named model; repeatable.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Model:
    """What is looked at."""

    model: Target
    rows: Rows = None
    dtype: Dtype = None
    mode: Mode = "inference"
    size: Size = None

    @property
    def training(self) -> bool:
        """Whether forward and backward graphs are meant; ``OptionError`` where ``mode`` is no word for either."""
        if self.mode not in ("inference", "training"):
            raise OptionError(f"--mode is {self.mode!r}", "use inference or training")
        return self.mode == "training"

    @property
    def sizes(self) -> dict[str, int]:
        return kitsune.one_of_each(self.size or ())


@dataclass(frozen=True)
class Plans:
    """How it is planned."""

    strategy: Strategy = "auto"
    device: Device = None
    queue_depth: Depth = None
    decode_step: Step = True


def _version(wanted: bool) -> None:
    if wanted:
        from tilestream import __version__

        out.print(f"tilestream {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
@reported
@grouped
def explain(
    what: Model,
    how: Plans,
    target: RunOn = "auto",
    cache: Cache = True,
    kernel: Annotated[bool, typer.Option("--kernel", help="Also print the CUDA source of the kernels.")] = False,
    kernel_file: Annotated[Path | None, typer.Option(help="Write the CUDA source of the kernels here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the HTML report here.")] = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Who runs what, regions, candidates, stages on SMs, queues, and why each operator that stayed out did so."""
    from tilestream.report import kernels
    from tilestream.report.explain import Report

    runs = not what.training and how.device is None and target != "reference"
    with Progress() as progress:
        options = _options(how, target, cache)
        if runs and where("auto") == "cuda":
            analysis = _measured(what, options, progress)
        else:
            analysis = _analysed(what, options, progress)
        report = Report(analysis)
        if html is not None:
            from tilestream.report import html as page
            from tilestream.report.simulation import Simulation

            simulated = Simulation.of(analysis, progress)
            page.write(html, report, page.content(simulated))
        source = kernels.text(analysis) if kernel or kernel_file is not None else ""
    out.print(report)
    if kernel:
        typer.echo(source)
    if kernel_file is not None:
        files.write(kernel_file, source)
        out.print(f"written: {kernel_file}")
    write_json(json_, report.json())


@app.command()
@reported
@grouped
def simulate(
    what: Model,
    how: Plans,
    html: Annotated[Path | None, typer.Option(help="Also write the HTML report here.")] = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Predicted time, bytes and utilisation of every strategy on a device by name; needs no GPU."""
    made = _simulated(what, how)
    if html is not None:
        from tilestream.report import html as page
        from tilestream.report.explain import Report

        page.write(html, Report(made.analysis), page.content(made))
    out.print(made)
    if html is not None:
        out.print(f"report: {html}")
    write_json(json_, made.json())


@app.command()
@reported
@grouped
def trace(
    what: Model,
    how: Plans,
    output: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("timeline.json"),
    measured: Annotated[
        bool, typer.Option("--measured", help="Also run the pipelines on this GPU, and write what every warp did when.")
    ] = False,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Write the simulated timeline of the whole model, and of every SM, as a file that ui.perfetto.dev opens."""
    from tilestream.report import measured as measured_
    from tilestream.report import timeline

    if measured:
        how = replace(how, device=measured_.device_here(how.device))
    made = _simulated(what, how)
    found = _recorded(made) if measured else None
    plan = None if made.analysis.empty else made.analysis.whole
    stepped = found.step_recordings() if found else None
    timeline.write(output, made.timelines(), found.recordings() if found else None, plan, stepped)
    out.print(made)
    if found:
        out.print(found)
    out.print(f"timeline: {output} (open it in ui.perfetto.dev or chrome://tracing)")
    write_json(json_, {**made.json(), "timeline": str(output), **({"measured": found.json()} if found else {})})


@app.command()
@reported
def check(
    model: Target,
    rows: Rows = None,
    dtype: Dtype = None,
    strategy: Strategy = "auto",
    target: RunOn = "auto",
    queue_depth: Depth = None,
    cache: Cache = True,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of torch's random numbers, set before the model is made.")
    ] = 0,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Run the model and hold it against float64: exit code 0 only if within twice eager's own error."""
    import torch

    from tilestream.apps.load import load
    from tilestream.bench import accuracy, analysed, arms, as_used
    from tilestream.report import whole
    from tilestream.run import prepare

    options = _options(Plans(strategy, None, queue_depth), target, cache)
    on = where(target)
    torch.manual_seed(seed)
    with Progress() as progress:
        progress(f"loading {model}")
        workload = load(model, rows_to_run(model, rows, on), dtype, on)
        refuse_random(workload)
        progress("running eager and float64")
        oracle = accuracy.Oracle(workload.module, workload.inputs, workload.keywords)
        not_finite = oracle.not_finite()
        ran_on = "the reference machine" if on == "cpu" else "the GPU"
        progress(f"running through tilestream on {ran_on}")
        if on == "cpu":
            options = options.with_(target="reference")
        torch.compiler.reset()  # what ran is what is compiled here
        compiled = len(prepare.analyses())
        with arms.planned_anew():
            arm = arms.make("tilestream", workload.module, workload.inputs, options, workload.keywords)
        judged = oracle.check(arm.run)
        same = oracle.repeatable(arm.run)
        analysis = as_used(analysed(workload, options), prepare.analyses()[compiled:], only=True)
    regions = {r.name: r.runner for r in analysis.regions}
    rows_of = {r.name: r.rows for r in analysis.regions}
    ok = judged.ok and same
    out.print(
        f"{workload.name}, inputs {workload.shapes} on {ran_on}: error {judged.error:.3e}, "
        f"eager's own {judged.eager_error:.3e}, "
        f"{'within' if judged.ok else 'OUTSIDE'} the tolerance; {'repeatable' if same else 'NOT REPEATABLE'}",
        soft_wrap=True,
    )
    if not_finite:
        out.print(f"{not_finite:.2%} of the result is NaN or infinite in float64: there only places and signs compare")
    out.print(whole.ran(analysis, [f"{name}: {how}, {rows_of[name]:,} rows" for name, how in regions.items()]))
    out.print(whole.coverage(analysis.coverage))
    facts = {
        "regions": regions,
        "model": workload.name,
        "rows": workload.rows,
        "seed": seed,
        "ran_on": ran_on,
        "ok": ok,
        "repeatable": same,
        "not_finite": not_finite,
        "coverage": analysis.coverage.json(),
    }
    write_json(json_, {**facts, "error": judged.error, "eager_error": judged.eager_error})
    if not ok:
        raise typer.Exit(1)


@app.command()
@reported
def bench(
    model: Annotated[str, typer.Argument(help="A model, as elsewhere, or the word queues: ring queues by payload.")],
    rows: Rows = None,
    dtype: Dtype = None,
    strategy: Strategy = "auto",
    target: RunOn = "auto",
    device: Device = None,
    queue_depth: Depth = None,
    cache: Cache = True,
    arms: Annotated[str, typer.Option(help="Which arms, separated by commas.")] = "",
    ncu: Annotated[bool, typer.Option(help="Count DRAM bytes with Nsight Compute where it is installed.")] = True,
    compile_time: Annotated[
        bool, typer.Option("--compile-time", help="Also time the first call, cold and with warm caches.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Instead, the host's time of a call in a plain loop, by parts.")
    ] = False,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Time eager, Inductor, Inductor max-autotune and tilestream, with errors, plan and predictions."""
    from tilestream import bench as bench_
    from tilestream.apps.load import load
    from tilestream.bench import text

    if model == "queues":
        _bench_queues(json_)
        return
    chosen = _arms(arms)
    options = _options(Plans(strategy, device, queue_depth), target, cache)
    on = where(target)
    if host and on == "cpu":
        raise DeviceError(
            "--host times a plain loop around kernels, and none run here: the reference machine takes seconds a call",
            "run it on an H100 or H200",
        )
    with Progress() as progress:
        progress(f"loading {model}")
        run_rows = rows_to_run(model, rows, on)
        workload = load(model, run_rows, dtype, on)
        if host:
            _bench_host(workload, options, json_, progress)
            return
        again = _again(run_rows, dtype, strategy, target)
        result = bench_.run(
            workload,
            options,
            arms=chosen,
            planned=planned(model, rows, dtype, run_rows) if on == "cpu" else None,
            counters=again if ncu and bench_.dram.available() else None,
            first_call=again if compile_time else None,
            progress=progress,
        )
    out.print(text.render(result))
    write_json(json_, result)
    if not result["ok"]:
        raise typer.Exit(1)


@app.command()
@reported
def demo(
    folder: Annotated[Path, typer.Option("--out", help="The folder for the report and the timeline.")] = Path(
        "demo-out"
    ),
    rows: Annotated[int, typer.Option(help="Points that times are predicted and measured for.")] = 262144,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """A NeRF on the rays of a made scene, from capture to report; on a GPU it also runs the kernels."""
    from tilestream.cli import demo as demo_

    with Progress() as progress:
        result = demo_.run(folder, rows, out, progress)
    write_json(json_, result)
    if not result["ok"]:
        raise typer.Exit(1)


kitsune.reproduce.command("flashfuser")(flashfuser.reproduce_command)
app.add_typer(kitsune.reproduce, name="reproduce")
app.add_typer(sparse, name="sparse")
app.command("sweep")(kitsune.sweep_command)


def _options(how: Plans, target: str = "auto", cache: bool = True) -> Options:
    from tilestream import devices

    options = parse({**vars(how), "target": target, "cache": cache})
    if how.device is not None:
        devices.get(how.device)  # a wrong name is told before a model is loaded
    return options


def _analysed(what: Model, options: Options, progress: Progress) -> Analysis:
    """Capture with all the rows and without memory, then plan; a model that needs values gets real tensors."""
    from tilestream.apps.load import load
    from tilestream.bench import analysed
    from tilestream.graph.capture import NeedsValuesError

    for fake in (True, False):
        progress(f"loading {what.model}")
        workload = load(what.model, what.rows, what.dtype, fake=fake, sizes=what.sizes, training=what.training)
        progress("capturing and planning")
        try:
            return analysed(workload, options, what.training)
        except NeedsValuesError:
            if not fake:
                raise
    raise AssertionError("real tensors have values")


def _simulated(what: Model, how: Plans) -> Simulation:
    from tilestream.report.simulation import Simulation

    with Progress() as progress:
        options = _options(replace(how, device=how.device or "h200"))
        return Simulation.of(_analysed(what, options, progress), progress)


def _recorded(simulated: Simulation) -> Measurements:
    from tilestream.report.measured import Measurements

    with Progress() as progress:
        return Measurements.of(simulated, progress)


def _measured(what: Model, options: Options, progress: Progress) -> Analysis:
    """Compile and run on the GPU, so that the candidates have measured times."""
    from tilestream.apps.load import load
    from tilestream.bench import measured

    progress(f"loading {what.model}")
    workload = load(what.model, what.rows, what.dtype, "cuda", sizes=what.sizes)
    progress("compiling, and timing the candidates on the GPU")
    return measured(workload, options)


def _arms(given: str) -> tuple[str, ...]:
    from tilestream.bench import ARMS

    chosen = tuple(a.strip() for a in given.split(",") if a.strip()) or ARMS
    unknown = [a for a in chosen if a not in ARMS]
    if unknown:
        raise OptionError(f"--arms names {unknown[0]!r}", f"use some of {', '.join(ARMS)}")
    return chosen


def _again(rows: int | None, dtype: str | None, strategy: str, target: str) -> list[str]:
    """Arguments of ``bench.once`` and ``bench.first_call`` that make the same model in another process."""
    given = ["--strategy", strategy, "--target", target]
    if rows is not None:
        given += ["--rows", str(rows)]
    if dtype is not None:
        given += ["--dtype", dtype]
    return given


def _bench_host(workload: Workload, options: Options, json_: Path | None, progress: Progress) -> None:
    from tilestream.bench import host, text

    result = host.run(workload, options if workload.tensors[0].is_cuda else options.with_(target="reference"), progress)
    out.print(text.host(result))
    write_json(json_, result)


def _bench_queues(json_: Path | None) -> None:
    from tilestream.bench import queues

    with Progress() as progress:
        result = queues.run(progress)
    out.print(queues.render(result))
    write_json(json_, result)
