"""Fills Triton's cache without a GPU, so that the first run on a GPU need not compile its kernels.

    python -m precondattn_gpu.warm FOLDER --ptxas PATH

It makes the calls of the first run (`warm_calls`); each launch is compiled but not run
(`precondattn_kernel_tools.triton_cache`). This has to run with the Triton and the Python of the
other machine: `twin.sh` creates such an environment. The same command resumes an interrupted one,
since kernels that are in the folder are not compiled again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import precondattn as pa
from precondattn_gpu.carried import note_used
from precondattn_gpu.options import PTXAS
from precondattn_gpu.warm_calls import TARGET, WarmCall, as_on_a_gpu, of_part_a, run, works
from precondattn_kernel_tools.triton_cache import GROUP, filled, moved
from precondattn_kernel_tools.triton_host_code import HostCode

UNFINISHED = 3
"""The exit code if kernels are left: run the same command again."""


class Done(NamedTuple):
    """The result of compiling a call's launches."""

    name: str
    compiled: int
    found: int
    left: int
    seconds: float
    folders: frozenset[str] = frozenset()
    """The cache folders that the call needs."""
    unsupported: str = ""
    """The reason why the backend does not run it."""

    def __str__(self) -> str:
        counts = f"{self.compiled} compiled, {self.found} found, {self.left} left"
        return f"{self.name}: {self.unsupported or f'{counts}, {self.seconds:.0f} s'}"


def fill(work: WarmCall, folder: Path, until: float) -> Done:
    """Compile the launches of a call, until a time of the clock `time.monotonic`."""
    started, unsupported = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as empty, as_on_a_gpu():
        host = HostCode(Path(empty))
        with filled(folder, TARGET, until, host.launcher) as kernels:
            host.driver()
            try:
                run(work)
            except pa.UnsupportedError as reason:
                unsupported = str(reason)
    seconds = time.monotonic() - started
    counts = len(kernels.compiled), len(kernels.found), kernels.left.total()
    folders = frozenset({*kernels.compiled, *kernels.found} | host.folders)
    return Done(work.name, *counts, seconds, folders, unsupported)


def main(
    folder: Annotated[Path, typer.Argument(help="the folder of the cache")],
    ptxas: Annotated[Path, typer.Option(help="the assembler that is carried")],
    match: Annotated[str, typer.Option(help="only calls whose name contains this")] = "",
    seconds: Annotated[float, typer.Option(help="stop after so many")] = float("inf"),
    jobs: Annotated[int, typer.Option(help="processes at once", min=1)] = os.cpu_count() or 1,
) -> None:
    """Fill Triton's cache for the first runs on a GPU, without one.

    The first part is also assembled with the assembler in the Triton package.
    """
    if not os.access(ptxas, os.X_OK):
        raise typer.BadParameter(f"--ptxas has to be a program; found {ptxas}")
    until = time.monotonic() + seconds
    moved(folder, folder.resolve())  # An earlier call may have used another path.
    everything = works(match)
    left = 0
    used: set[str] = set()
    # Part A is also assembled by Triton's own program, to tell which assembler causes a wrong
    # result.
    part_a = {*of_part_a()}
    again = [work for work in everything if work in part_a]
    for program, chosen in ((str(ptxas.resolve()), everything), (None, again)):
        for done in _filled(chosen, folder.resolve(), until, jobs, program):
            left += done.left
            used |= done.folders
    note_used(folder, used)
    print(f"{sum(any((folder / name).glob(f'{GROUP}*')) for name in used)} kernels")
    raise typer.Exit(UNFINISHED if left else 0)


def _filled(
    chosen: list[WarmCall], folder: Path, until: float, jobs: int, ptxas: str | None
) -> Iterator[Done]:
    """Fill the cache in separate processes, since Triton reads the assembler's version once."""
    os.environ.pop(PTXAS, None)
    if ptxas is not None:
        os.environ[PTXAS] = ptxas
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(fill, work, folder, until) for work in chosen]
        for number, each in enumerate(running, 1):
            done = each.result()
            print(f"{number}/{len(running)} {done}", flush=True)
            yield done


if __name__ == "__main__":
    typer.run(main)
