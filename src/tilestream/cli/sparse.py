"""``tilestream sparse``: run, simulate, search, reproduce."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tilestream import files
from tilestream.cli.console import out, reported, write_json
from tilestream.cli.grouped import grouped
from tilestream.cli.progress import Progress, first_compilation
from tilestream.errors import OptionError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sparse programs as streaming dataflow graphs: values, cycles, schedules, and the paper's results again.",
)

Depth = Annotated[int | None, typer.Option(help="Slots of every channel; without it, channels have no bound.")]
Memory = Annotated[str, typer.Option(help="none, simple, or hbm:channels=8,latency=40.")]
Timing = Annotated[str, typer.Option(help="Whose reductions and accumulators: comal, or sam (SAM's simulator).")]
Engine = Annotated[str, typer.Option(help="fast (compiled), or spec (token by token in Python).")]
Check = Annotated[bool, typer.Option(help="Hold values against dense PyTorch; exit code 1 where they differ.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the result as Matrix Market.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write a page with the graphs, their tokens and stalls.")]
Timeline = Annotated[Path | None, typer.Option(help="Write a timeline that ui.perfetto.dev opens.")]
Target = Annotated[str, typer.Option("--target", help="streams; cpu: loops; cuda, reference: pipelines and PyTorch.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class What:
    """What is run, on what."""

    target: Annotated[str, typer.Argument(help="An einsum, as 'ik,kj->ij', or FILE.py:FUNCTION -> (module, inputs).")]
    operands: Annotated[list[Path] | None, typer.Argument(help="Matrix Market files, one an operand.")] = None
    format: Annotated[
        list[str] | None,
        typer.Option(
            help="An operand's levels, as compressed,dense or compressed,compressed:1,0; of a module NAME=..."
        ),
    ] = None

    def load(self, progress: Progress) -> Any:
        from tilestream.sparse import load

        progress(f"loading {self.target}")
        return load.load(self.target, self.operands or (), self.format or ())


@dataclass(frozen=True)
class How:
    """Its schedule."""

    fuse: Annotated[str, typer.Option(help="auto (by estimates), none, all, or regions: T0,T1/T2.")] = "auto"
    order: Annotated[str, typer.Option(help="Indices from the outside, as i,k,j, or the number of an order.")] = ""
    parallel: Annotated[list[str] | None, typer.Option(help="INDEX=FACTOR; may be given for several indices.")] = None
    block: Annotated[int, typer.Option(help="Edge of the square blocks that are the values; 1: scalars.")] = 1

    def schedule(self) -> Any:
        from tilestream.sparse import load

        return load.parse_schedule(self.fuse, self.order, self.parallel or (), self.block)


@app.command()
@reported
@grouped
def run(
    what: What,
    how: How,
    depth: Depth = None,
    engine: Engine = "fast",
    target_: Target = "streams",
    dtype: Annotated[str, typer.Option(help="Of cuda and reference: float32, bfloat16 or float16.")] = "float32",
    check: Check = True,
    output: Out = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Run a program and hold its values against dense PyTorch in float64; exit code 1 where they differ."""
    if target_ not in ("streams", "cpu", "cuda", "reference"):
        raise OptionError(f"--target is {target_!r}", "use streams, cpu, cuda or reference")
    if target_ != "streams" and (depth is not None or engine != "fast"):
        raise OptionError(f"{'--depth' if depth is not None else '--engine'} with --target {target_}", "leave it out")
    if target_ == "cpu":
        return _run_loops(what, how, check, output, json_)
    if target_ != "streams":
        return _run_pipelines(what, how, target_, dtype, check, output, json_)
    with Progress() as progress:
        loaded, program, made = _execute(what, how, engine, progress, depth=depth)
        found = _checked(check, loaded, progress, lambda checks: checks.check(loaded, made, program))
    out.print(f"{loaded.name}: {made.cycles:,} cycles")
    _say_choice(program)
    _save(output, made.outputs)
    _conclude(found, json_, {"target": loaded.name, "schedule": str(program.schedule), **_figures(program, made)})


@app.command()
@reported
@grouped
def simulate(
    what: What,
    how: How,
    depth: Depth = None,
    memory: Memory = "none",
    timing: Timing = "comal",
    engine: Engine = "fast",
    check: Check = True,
    output: Out = None,
    table: Annotated[bool, typer.Option(help="Print the fusion table of every region.")] = False,
    html: Html = None,
    timeline: Timeline = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Cycles, operations and bytes of a program, by node, and what each node waited for."""
    from tilestream.sparse import load, report

    with Progress() as progress:
        settings = {"depth": depth, "memory": load.parse_memory(memory), "timing": load.parse_timing(timing)}
        if engine == "spec":
            if memory != "none":
                raise OptionError("--memory with --engine spec", "memory is timed by --engine fast")
            del settings["memory"]
        loaded, program, made = _execute(what, how, engine, progress, **settings)
        found = _checked(check, loaded, progress, lambda checks: checks.check(loaded, made, program))
    out.print(f"{loaded.name}: {made.cycles:,} cycles, {made.flops:,} operations, {made.bytes:,} bytes")
    _say_choice(program)
    out.print(f"schedule: {program.schedule}", soft_wrap=True)
    for region in program.regions:
        result = made.regions[region.name]
        out.print(f"\nregion {region.name}: {result.cycles:,} cycles")
        if table:
            out.print(str(region.table), soft_wrap=True)
        out.print(report.node_table(result))
    _save(output, made.outputs)
    if html is not None:
        shown = [(r.name, r.graph, made.regions[r.name], str(r.table)) for r in program.regions]
        files.write(html, report.page(loaded.name, shown, str(program.schedule)))
        out.print(f"page: {html}")
    if timeline is not None:
        report.write_timeline(timeline, made.regions)
        out.print(f"timeline: {timeline} (open it in ui.perfetto.dev or chrome://tracing)")
    _conclude(found, json_, {"target": loaded.name, "schedule": str(program.schedule), **_figures(program, made)})


@app.command()
@reported
@grouped
def search(
    what: What,
    budget: Annotated[float, typer.Option(help="Seconds; one candidate is always run to its end.")] = 60.0,
    orders: Annotated[int, typer.Option(help="Index orders to try of each fusion.")] = 4,
    factors: Annotated[str, typer.Option(help="Parallel factors, separated by commas.")] = "2,4",
    blocks: Annotated[str, typer.Option(help="Block edges, separated by commas; 1: scalars.")] = "1",
    indices: Annotated[str, typer.Option(help="Indices to make parallel; empty: the outermost.")] = "",
    depth: Annotated[int, typer.Option(help="Slots of a channel, for the on-chip memory.")] = 64,
    bounded: Annotated[bool, typer.Option(help="Simulate with channels of that depth.")] = False,
    slack: Annotated[float, typer.Option(help="Drop what another is expected to beat by this factor.")] = 2.0,
    check: Check = True,
    plot: Annotated[Path | None, typer.Option(help="Write cycles against bytes as SVG.")] = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Estimate, prune and simulate schedules within a budget; prints the Pareto front and the best schedule as code."""
    from tilestream.sparse import search as search_

    if not budget > 0:  # not a number among them
        raise OptionError(f"--budget is {budget:g} seconds", "give a number above 0")
    if depth < 1:
        raise OptionError(f"--depth is {depth}", "use 1 or more")
    with Progress() as progress:
        loaded = what.load(progress)
        names = tuple(filter(None, indices.split(",")))
        space = search_.Space(orders, _numbers("factors", factors), names, _numbers("blocks", blocks))
        found = search_.search(
            loaded.make,
            loaded.inputs,
            space,
            budget_s=budget,
            slack=slack,
            depth=depth,
            progress=progress,
            bounded=bounded,
            expected=(lambda: _expected(loaded, progress)) if check else None,
        )
    out.print(found.table())
    counts = (
        f"{found.estimated} estimated, {found.pruned} pruned, {len(found.points)} simulated, {found.unsimulated} left"
    )
    out.print(f"{counts}, {sum(found.refused.values())} refused; {found.seconds:.1f} s")
    if found.seconds > 1.1 * budget:
        out.print(
            f"the budget was {budget:g} s: {found.longest}, and a candidate is not left half done",
            markup=False,
            soft_wrap=True,
        )
    for why, count in sorted(found.refused.items(), key=lambda x: -x[1])[:3]:
        out.print(f"  {count} times: {why}", soft_wrap=True)
    out.print(f"best schedule:\n{found.best.schedule}", soft_wrap=True)
    if plot is not None:
        files.write(plot, found.plot())
        out.print(f"plot: {plot}")
    write_json(json_, {"target": loaded.name, **found.json()})


@app.command()
@reported
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Studies; all by default.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    quick: Annotated[bool, typer.Option(help="Smaller graphs where a study allows it; each row says so.")] = False,
    cora: Annotated[Path | None, typer.Option(help="cora.cites or its folder; or set TILESTREAM_CORA.")] = None,
    most_cycles: Annotated[float, typer.Option(help="Estimate what is expected to take more cycles.")] = 1e9,
    folder: Annotated[Path | None, typer.Option("--out", help="A folder: one JSON file a study.")] = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """The paper's tables again, every row beside the published figure."""
    from tilestream.sparse import reproduce as studies

    if list_:
        for name, (words, _) in studies.STUDIES.items():
            out.print(f"{name:12} {words}")
        return
    unknown = [n for n in names or [] if n not in studies.STUDIES]
    if unknown:
        raise OptionError(f"there is no study {unknown[0]!r}", f"the studies are {', '.join(studies.STUDIES)}")
    made = []
    with Progress() as progress:
        options = studies.Options(quick=quick, cora=cora, most_cycles=most_cycles, progress=progress)
        for name in names or studies.STUDIES:
            study = studies.run(name, options)
            made.append(study.json())
            out.print(study.table())
            for note in (*study.errors(), *study.notes):
                out.print(f"- {note}", soft_wrap=True)
            if folder is not None:
                write_json(folder / f"{name}.json", study.json())
    write_json(json_, {"studies": made})


def _execute(what: What, how: How, engine: str, progress: Progress, **settings: Any) -> tuple[Any, Any, Any]:
    if engine not in ("fast", "spec"):
        raise OptionError(f"--engine is {engine!r}", "use fast or spec")
    if settings.get("depth") is not None and settings["depth"] < 1:
        raise OptionError(f"--depth is {settings['depth']}", "use 1 or more, or leave it out")
    schedule = how.schedule()
    loaded = what.load(progress)
    progress("compiling")
    program = _made(loaded, schedule)
    count = len(program.regions)
    progress(f"simulating {count} region{'' if count == 1 else 's'}")
    with first_compilation(progress) if engine == "fast" else nullcontext():
        return loaded, program, program.run(*loaded.inputs, engine=engine, **settings)


def _made(loaded: Any, schedule: Any) -> Any:
    """
    Raises:
        SparseError: it returns no tensor.
    """
    from tilestream.errors import SparseError

    program = loaded.make(schedule)
    if not program.outputs:
        raise SparseError(f"{loaded.name} returns no tensor", "return what operators on tensors make")
    if program.eager:
        steps = ", ".join(str(step) for step in program.eager)
        out.print(f"run by PyTorch between regions, dense and not timed: {steps}", markup=False, soft_wrap=True)
    return program


def _run_loops(what: What, how: How, check: bool, output: Path | None, json_: Path | None) -> None:
    """A program as loops on the CPU: compiled, then whole calls, the fastest of three of which counts."""
    from tilestream.sparse.cpu import CpuProgram

    schedule = how.schedule()
    if schedule.parallel:
        out.print("--parallel is for streams: these loops run on PyTorch's threads whatever it says", markup=False)
    with Progress() as progress:
        loaded = what.load(progress)
        progress("compiling")
        program = _made(loaded, schedule)
        loops = CpuProgram(program)
        loops.run(*loaded.inputs)
        progress("running")
        made = min((loops.run(*loaded.inputs) for _ in range(3)), key=lambda one: one.seconds)
        found = _checked(check, loaded, progress, lambda checks: checks.check(loaded, made, program))
    out.print(f"{loaded.name}: {1000 * made.seconds:.3f} ms")
    _say_choice(loops.program)
    for name, seconds in made.regions.items():
        how_ = " as streams: its result is too large for an array" if name in loops.streamed else ""
        out.print(f"  {name}: {1000 * seconds:.3f} ms{how_}")
    _save(output, made.outputs)
    figures = {
        "target": loaded.name,
        "schedule": str(loops.program.schedule),
        "seconds": made.seconds,
        "regions": made.regions,
    }
    _conclude(found, json_, figures)


def _run_pipelines(
    what: What, how: How, target: str, dtype: str, check: bool, output: Path | None, json_: Path | None
) -> None:
    """A program as ragged pipelines, and PyTorch's operators between them: a line a statement, times on a GPU."""
    from tilestream.sparse.pipelines import PipelineProgram, parse_dtype, report

    wanted = parse_dtype(dtype)
    if how != How():
        out.print("--fuse, --order and --parallel are for streams and loops: pipelines are cut by themselves")
    with Progress() as progress:
        loaded = what.load(progress)
        progress("compiling")
        program = _made(loaded, How("none", block=how.block).schedule())
        bound = PipelineProgram(program, target, wanted).bind(*loaded.inputs)
        progress("running")
        outputs = tuple(x.double().cpu() for x in bound())
        told = report.told(bound)
        found = _checked(check, loaded, progress, lambda checks: checks.narrow(loaded, outputs, wanted))
    out.print(report.table(loaded.name, told))
    _save(output, outputs)
    _conclude(found, json_, {"target": loaded.name, "runs on": target, "dtype": dtype, **told})


def _say_choice(program: Any) -> None:
    """What ``--fuse auto`` chose, beside the alternatives."""
    if program.choice is not None:
        out.print(str(program.choice), soft_wrap=True)


def _checked(wanted: bool, loaded: Any, progress: Progress, compare: Callable[[Any], Any]) -> Any:
    """What the values are like beside PyTorch's; None if that is not wanted."""
    from tilestream.sparse import checks

    if not wanted:
        return None
    progress(f"running {loaded.oracle()}")
    found = compare(checks)
    if found is None:
        out.print("values: not compared, a dense run would be too large")
    return found


def _expected(loaded: Any, progress: Progress) -> Any:
    from tilestream.errors import SparseError

    progress("running dense PyTorch")
    try:
        return loaded.reference()
    except SparseError:
        out.print("values: not compared, a dense run would be too large; run compares a smaller one")
        return None


def _conclude(found: Any, json_: Path | None, figures: dict[str, Any]) -> None:
    """Say what the values are like, write the JSON, and leave with exit code 1 where they differ."""
    said = {} if found is None else {"error": found.error, "ok": found.ok, "compared with": found.on}
    if found is not None:
        out.print(str(found), soft_wrap=True)
    write_json(json_, figures | said)
    if found is not None and not found.ok:
        raise typer.Exit(1)


def _figures(program: Any, made: Any) -> dict[str, Any]:
    """``cycles``, ``flops``, ``bytes`` and ``nodes`` of the whole, and of each region; ``eager``: what PyTorch ran."""
    from tilestream.sparse import report

    regions = {name: report.result_json(r) for name, r in made.regions.items()}
    nodes = [{"region": name, **node} for name, r in regions.items() for node in r["nodes"]]
    cycles = {name: r["cycles"] for name, r in regions.items()}
    whole = {"cycles": made.cycles, "flops": made.flops, "bytes": made.bytes}
    return whole | {"regions": cycles, "nodes": nodes, "eager": [str(step) for step in program.eager]}


def _save(path: Path | None, outputs: Any) -> None:
    from tilestream.sparse import load

    if path is not None:
        load.write(path, outputs[0])
        out.print(f"result: {path}")


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(x) for x in text.split(",") if x.strip())
    except ValueError:
        raise OptionError(f"--{name} is {text!r}", "write whole numbers, separated by commas") from None
