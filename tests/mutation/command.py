"""Do the tests notice a change of one token? A sample of a hundred, drawn once.

    python -m tests.mutation.command draw
    python -m tests.mutation.command cover -- -n 2 --dist loadfile -m "not slow"
    python -m tests.mutation.command kill before --jobs 2
    python -m tests.mutation.command table

`cover` needs Python 3.12, and writes to `build/mutation`, which is not committed. Verdicts are in
`record.json`, which is committed. `kill` continues where it was stopped.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from tests.mutation.cover import alone, covering, seconds_of
from tests.mutation.cover import cover as run_and_note
from tests.mutation.draw import ROOT, DrawnMutant
from tests.mutation.draw import draw as drawn_sample
from tests.mutation.kill import GONE, KILLED, SURVIVED, UNTOUCHED
from tests.mutation.kill import kill as verdict_of

RECORD = Path(__file__).resolve().parent / "record.json"
STATES = (KILLED, SURVIVED, UNTOUCHED, GONE)
app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()

Folder = Annotated[Path, typer.Option(help="where notes and times are")]
NOTES = ROOT / "build" / "mutation"


@app.command()
def draw() -> None:
    """Draw the sample; refuses if one exists, since its verdicts would be lost."""
    if RECORD.exists():
        raise typer.BadParameter(f"{RECORD.name} has a sample already")
    _save([drawn.saved() | {"verdicts": {}} for drawn in drawn_sample()])


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def cover(context: typer.Context, folder: Folder = NOTES) -> None:
    """Run the tests once, with pytest's options, and note which of them execute which mutant."""
    raise typer.Exit(run_and_note(_sample(), folder, context.args))


@app.command()
def kill(
    run: Annotated[str, typer.Argument(help="the name of the column in the record")],
    folder: Folder = NOTES,
    among: Annotated[str, typer.Option(help="only mutants that this run killed")] = "",
    besides: Annotated[str, typer.Option(help="what this run killed is killed here too")] = "",
    jobs: int = os.cpu_count() or 1,
    option: Annotated[list[str] | None, typer.Option(help="an option for pytest")] = None,
) -> None:
    """Run each mutant's tests until one fails."""
    entries = json.loads(RECORD.read_text(encoding="utf-8"))
    for entry in entries:
        if entry["verdicts"].get(besides, {}).get("status") == KILLED:
            entry["verdicts"][run] = entry["verdicts"][besides]
    _save(entries)
    tests, seconds = covering(_sample(), folder), seconds_of(folder)
    waiting = [
        i
        for i, entry in enumerate(entries)
        if run not in entry["verdicts"]
        and (not among or entry["verdicts"][among]["status"] == KILLED)
    ]
    with ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(
                verdict_of,
                _drawn(entries[i]),
                tests[i],
                seconds,
                option or [],
                [alone(verdict["test"]) for verdict in entries[i]["verdicts"].values()],
            ): i
            for i in waiting
        }
        done = as_completed(futures)
        for future in track(done, "mutants", total=len(futures), console=console):
            entry, verdict = entries[futures[future]], future.result()
            entry["verdicts"][run] = verdict.saved()
            _save(entries)
            said = f"{verdict.status:9} {entry['file']} {entry['key'][:60]}  {verdict.test}"
            console.print(said, markup=False, highlight=False)


@app.command()
def table() -> None:
    """Print the counts of each run, and the mutants that only some of the runs killed."""
    entries = json.loads(RECORD.read_text(encoding="utf-8"))
    runs = list(dict.fromkeys(run for entry in entries for run in entry["verdicts"]))
    console.print(f"| run | {' | '.join(('killed', 'survived', 'untouched'))} |", markup=False)
    console.print("|---|---|---|---|---|")
    for run in runs:
        states = [entry["verdicts"].get(run, {}).get("status") for entry in entries]
        counts = [str(states.count(s)) for s in STATES]
        console.print(f"| {run} | {' | '.join(counts)} |", markup=False)
    for entry in entries:
        states = {run: entry["verdicts"].get(run, {}).get("status") for run in runs}
        if set(states.values()) != {KILLED}:
            console.print(f"{entry['file']}: {entry['key']}\n    {states}", markup=False)


def _sample() -> list[DrawnMutant]:
    return [_drawn(entry) for entry in json.loads(RECORD.read_text(encoding="utf-8"))]


def _drawn(entry: dict[str, Any]) -> DrawnMutant:
    return DrawnMutant(entry["file"], entry["key"], entry["kind"])


def _save(entries: list[dict[str, Any]]) -> None:
    beside = RECORD.with_suffix(".part")
    beside.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(RECORD)


if __name__ == "__main__":
    app()
