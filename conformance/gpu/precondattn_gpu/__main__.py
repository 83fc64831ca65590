"""The command line: `python -m precondattn_gpu`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from precondattn_gpu import first, machine, second
from precondattn_gpu.options import CPU, CUDA, RunOptions
from precondattn_gpu.processes import TaskProcesses
from precondattn_gpu.results import Results

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


def main(
    is_first: Annotated[
        bool, typer.Option("--first", help="the first eight and a half minutes")
    ] = False,
    is_second: Annotated[
        bool, typer.Option("--second", help="the three minutes after them")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="the folder for results")] = None,
    before: Annotated[
        Path | None, typer.Option(help="a folder with results of an earlier call")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="seconds for this call, in place of its own limit", min=20)
    ] = None,
    since: Annotated[
        float | None, typer.Option(help="when the command line began, as `date +%s`")
    ] = None,
    ptxas: Annotated[
        Path | None, typer.Option(help="the assembler for Triton, in place of its own")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to interpret and simulate")] = CUDA,
    match: Annotated[str, typer.Option(help="only calls whose name contains this")] = "",
    cores: Annotated[int | None, typer.Option(help="instead of this machine's", min=1)] = None,
) -> None:
    """Run a prepared run on a GPU; exit with 1 if a task did not pass."""
    if device not in (CUDA, CPU):
        _stop(f"--device must be {CUDA} or {CPU}; found {device!r}")
    if ptxas is not None and not os.access(ptxas, os.X_OK):
        _stop(f"--ptxas must be a program; found {ptxas}")
    if is_first == is_second:
        _stop("give one of --first and --second")
    if out is None:
        _stop("--out FOLDER is needed")
    options = RunOptions(device, match, ptxas="" if ptxas is None else str(ptxas.resolve()))
    options = options if cores is None else replace(options, cores=cores)
    try:
        good = run(is_first, options, out, before, limit, since)
    except (ValueError, RuntimeError) as error:
        _stop(str(error))
    raise typer.Exit(0 if good else 1)


def run(
    is_first: bool,
    options: RunOptions,
    out: Path,
    before: Path | None,
    limit: float | None,
    since: float | None,
) -> bool:
    """Run the first or the second run; returns whether everything passed.

    `since` is the time at which the command line began, in seconds since 1970; None means now.
    """
    described = machine.describe(options)
    name = machine.folder_name(described["device"])
    folders = [folder / name for folder in (out, before) if folder is not None]
    results = {file: _earlier(file, folders) for file in (*first.FILES, second.FILE)}
    for each in results.values():
        machine.require_same(each.file, each.machine, described)
        each.machine = dict(described)
    _say(
        f"{described['device']}: " + ", ".join(f"{n} {v}" for n, v in described["versions"].items())
    )
    module = first if is_first else second
    plan = module.parts(options, module.LIMIT if limit is None else limit)
    with TaskProcesses(ENVIRONMENT) as launcher:
        start = launcher.now() - (0.0 if since is None else max(time.time() - since, 0.0))
        date = datetime.now(UTC).isoformat(timespec="seconds")
        first.run(plan, launcher, out / name, start, results, _say, date=date, code=machine.code())
    bad = first.failures(results)
    _say(f"\n{len(bad)} did not pass" + (":" if bad else ""))
    for line in (*bad, *first.counts(results)):
        _say(line)
    return not bad


def _say(text: str) -> None:
    print(text, flush=True)


def _earlier(file: str, folders: list[Path]) -> Results:
    """The results that an earlier call saved, from the first folder that has them."""
    paths = [path for folder in folders if (path := folder / f"{file}.json").exists()]
    return Results.load(paths[0]) if paths else Results(file)


def _stop(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
