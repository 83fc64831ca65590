"""Runs the code of judgements as a reader would, and records what it prints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from precondattn_conformance.ecosystem.judgement import Judgement
from precondattn_conformance.ecosystem.table import Table
from precondattn_conformance.report.printable import printable

SECONDS = 120


def run_snippets(table: Table, judgements: Iterable[Judgement], *, jobs: int = 2) -> None:
    """Run the code of judgements whose rows were compared, and add the printed output to the table.

    Up to `jobs` run at once.

    Raises
    ------
    RuntimeError
        if the code of one fails.
    """
    table.printed.clear()
    codes = [j.code for j in judgements if j.code and any(row.checks for row in j.rows(table))]
    with ThreadPoolExecutor(jobs) as threads:
        table.printed.update(zip(codes, threads.map(printed, codes), strict=True))


def printed(code: str) -> str:
    """The output of the code in a separate process."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"the code of a judgement failed with {last!r}:\n{code}")
    return printable(done.stdout).strip()
