"""The command line: `python -m precondattn_gpu`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn_gpu import first_command, machine
from precondattn_gpu.driver import LIMIT, Summary, run_stage
from precondattn_gpu.dry_run import dry_run
from precondattn_gpu.options import CPU, CUDA, RunOptions
from precondattn_gpu.processes import TaskProcesses
from precondattn_gpu.results import Results
from precondattn_gpu.stages import STAGES, Stage, named
from precondattn_gpu.task import STATUSES

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "FLA_CACHE_RESULTS": "0",
}
"""Environment variables of the tasks' processes. JAX does not reserve the device's memory. Each
process has one thread, since many processes run at once. flash-linear-attention does not cache its
configurations on disk, so it chooses them where it is timed, on an idle device."""
UNFINISHED = 3
"""The exit code if tasks are left: run the same command again."""

console = Console() if Console().is_terminal else Console(width=160)


def main(
    stage: Annotated[
        list[str] | None,
        typer.Option(help="a stage, or `all`; may be repeated: in the order given"),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="print the stages and exit")] = False,
    out: Annotated[Path | None, typer.Option(help="the folder for results")] = None,
    before: Annotated[
        Path | None, typer.Option(help="a folder with results of earlier calls")
    ] = None,
    first: Annotated[
        bool, typer.Option("--first", help="the first nine minutes, as prepared")
    ] = False,
    second: Annotated[bool, typer.Option("--second", help="the three minutes after them")] = False,
    limit: Annotated[
        float | None,
        typer.Option(help=f"seconds for this call; {LIMIT:.0f} for stages", min=20),
    ] = None,
    since: Annotated[
        float | None, typer.Option(help="when the command line began, as `date +%s`")
    ] = None,
    ptxas: Annotated[
        Path | None, typer.Option(help="the assembler for Triton, in place of its own")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to interpret and simulate")] = CUDA,
    match: Annotated[str, typer.Option(help="only tasks whose name contains this")] = "",
    jobs: Annotated[int | None, typer.Option(help="processes at once", min=1)] = None,
    cores: Annotated[int | None, typer.Option(help="instead of this machine's", min=1)] = None,
    again: Annotated[
        bool, typer.Option("--again", help="run again what did not pass before")
    ] = False,
    pretend: Annotated[
        bool, typer.Option("--dry-run", help="run nothing: a clock that jumps, and its calls")
    ] = False,
) -> None:
    """Run stages of the first measurements on a GPU; stop in time, and resume later."""
    if device not in (CUDA, CPU):
        _stop(f"--device must be {CUDA} or {CPU}; found {device!r}")
    if ptxas is not None and not os.access(ptxas, os.X_OK):
        _stop(f"--ptxas must be a program; found {ptxas}")
    options = RunOptions(device, match, ptxas="" if ptxas is None else str(ptxas.resolve()))
    options = options if cores is None else replace(options, cores=cores)
    if first or second:
        _prepared(first, second, bool(stage), options, out, before, limit, since, pretend)
        return
    try:
        names = [each for each in stage or () if each != "all"]
        chosen = list(STAGES) if not names else [named(name) for name in names]
    except ValueError as error:
        _stop(str(error))
    chosen = [each for each in chosen if each.tasks(options)]
    if not chosen:
        _stop(f"no task of these stages has {match!r} in its name")
    if list_:
        _print_stages(chosen, options)
        return
    if not stage or out is None:
        _stop("--stage NAME and --out FOLDER are needed, or --list")
    limit = LIMIT if limit is None else limit
    if pretend:
        _pretend(chosen, options, out, limit)
        return
    try:
        described = machine.describe(options)
        with TaskProcesses(ENVIRONMENT) as launcher:
            left = _run(launcher, chosen, options, described, out, before, limit, jobs, again)
    except (ValueError, RuntimeError) as error:
        _stop(str(error))
    raise typer.Exit(UNFINISHED if left else 0)


def _prepared(
    is_first: bool,
    is_second: bool,
    has_stages: bool,
    options: RunOptions,
    out: Path | None,
    before: Path | None,
    limit: float | None,
    since: float | None,
    pretend: bool,
) -> None:
    """The first or the second run; with `--dry-run`, both."""
    if has_stages or (is_first and is_second and not pretend):
        _stop("give one of --stage, --first and --second")
    if out is None:
        _stop("--out FOLDER is needed")
    try:
        if pretend:
            _require_empty(out)
            first_command.pretend(options, out, _say)
            return
        which = first_command.FIRST if is_first else first_command.SECOND
        good = first_command.run(which, options, out, before, limit, since, ENVIRONMENT, _say)
    except (ValueError, RuntimeError) as error:
        _stop(str(error))
    raise typer.Exit(0 if good else 1)


def _say(text: str) -> None:
    console.print(escape(text), soft_wrap=True, highlight=False)


def _run(
    launcher: TaskProcesses,
    chosen: list[Stage],
    options: RunOptions,
    described: JsonObject,
    out: Path,
    before: Path | None,
    limit: float,
    jobs: int | None,
    again: bool,
) -> bool:
    """Run the chosen stages; returns whether tasks are left."""
    end = launcher.now() + limit
    left = False
    name = machine.folder_name(described["device"])
    out, before = out / name, None if before is None else before / name
    for stage in chosen:
        if reason := _lacks(stage, options):
            console.print(f"[yellow]{stage.name}[/yellow]: {escape(reason)}")
            left = True
            continue
        results = _earlier(stage, out, before) or Results(stage.name)
        machine.require_same(stage.name, results.machine, described)
        results.machine = dict(described)
        remaining = end - launcher.now()
        if remaining < 20:
            console.print(f"[yellow]{stage.name}[/yellow]: no time is left in this call")
            left = True
            continue
        summary = run_stage(
            results,
            stage.tasks(options),
            launcher,
            out,
            jobs=jobs or stage.jobs(options),
            limit=remaining,
            again=again,
            started=_say,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            code=machine.code(),
        )
        _print_summary(results, summary)
        left = left or not summary.is_complete
    return left


def _lacks(stage: Stage, options: RunOptions) -> str:
    """The reason why a stage can not run here; empty if it can."""
    if options.is_cpu and not stage.on_a_cpu:
        return "needs a GPU"
    if stage.program and shutil.which(stage.program) is None:
        return f"needs {stage.program}, which is not on the PATH"
    return ""


def _earlier(stage: Stage, out: Path, before: Path | None) -> Results | None:
    """The results that an earlier call saved, in this call's folder or the other one."""
    for folder in (out, before):
        if folder is not None and (path := folder / f"{stage.name}.json").exists():
            return Results.load(path)
    return None


def _print_stages(chosen: list[Stage], options: RunOptions) -> None:
    table = Table("stage", "tasks", "at once", "estimate", "what", title_justify="left")
    for stage in chosen:
        tasks = stage.tasks(options)
        minutes = f"{stage.estimate(options) / 60:.1f} min"
        what = stage.what + (f" (needs {stage.program})" if stage.program else "")
        table.add_row(stage.name, str(len(tasks)), str(stage.jobs(options)), minutes, what)
    console.print(table)


def _print_summary(results: Results, summary: Summary) -> None:
    counts = ", ".join(f"{n} {s}" for s in STATUSES if (n := results.count(s)))
    state = "complete" if summary.is_complete else f"{summary.left} left: run it again"
    console.print(
        f"[bold]{summary.stage}[/bold]: {counts or 'nothing ran'}; "
        f"{summary.ran} in {summary.seconds:.0f} s; {state}"
    )


def _pretend(chosen: list[Stage], options: RunOptions, out: Path, limit: float) -> None:
    _require_empty(out)
    try:
        calls = dry_run(chosen, options, out, limit)
    except RuntimeError as error:
        _stop(str(error))
    table = Table("call", "stage", "tasks", "left", "seconds", title="pretended calls")
    for call in calls:
        s = call.summary
        table.add_row(str(call.number), s.stage, str(s.ran), str(s.left), f"{s.seconds:.0f}")
    console.print(table)
    size = sum(path.stat().st_size for path in out.glob("*.json"))
    console.print(f"{len(list(out.glob('*.json')))} files, {size / 2**20:.1f} MiB")


def _require_empty(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        _stop(f"--out must be an empty folder for a dry run; {out} is not")


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error[/red]: {escape(message)}", soft_wrap=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
