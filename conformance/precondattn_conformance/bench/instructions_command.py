"""`precondattn bench --instructions`: count the rows, and print or save the counts."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn.json_types import JsonObject
from precondattn_conformance.bench import instructions, machine
from precondattn_conformance.bench.instructions import (
    SLACK,
    SLACK_OF_SMALL,
    counts,
    is_worse,
    missing,
)
from precondattn_conformance.writable import require_writable

FILE = Path(__file__).with_name("committed_instructions.json")

LIBRARIES = ("numpy", "torch")


def kind() -> JsonObject:
    """What has to be equal so that counts are."""
    described = machine.describe()
    return {
        "system": described["system"],
        "processor": described["processor"],
        "model": processor_model(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: described["versions"].get(name) for name in LIBRARIES},
    }


def processor_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Family, model and cache: a virtual machine may hide the processor's name."""
    lines = info.read_text().splitlines() if info.exists() else []
    found: dict[str, str] = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines) if line)
    }
    names = ("cpu family", "model", "cache size")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def load(path: Path) -> list[JsonObject]:
    """The entries of a file, one for each kind; none if it does not exist.

    Raises
    ------
    ValueError
        if the file has something else in it.
    """
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if any(set(entry) != {"kind", "date", "counts"} for entry in entries):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f"{path} has no counts of instructions") from None
    return list(entries)


def run(names: tuple[str, ...], save: Path | None, console: Console) -> int:
    """Count the rows and judge them, or write them to a file.

    The exit code is 1 if a count is worse than the committed one. Where valgrind is missing nothing
    is judged.

    Raises
    ------
    ValueError, CannotCountError
        if a name is no row, or if valgrind fails.
    """
    instructions.cases(names)  # Names are checked first.
    require_writable(save)
    if (reason := missing()) is not None:
        console.print(f"no instructions were counted: {reason}")
        return 0 if save is None else 1
    here = kind()
    committed: dict[str, int] = next((e["counts"] for e in load(FILE) if e["kind"] == here), {})
    if save is None and not committed:
        console.print("no committed counts for these versions: recorded only")
    found = counts(names)
    _print(found, committed, console)
    if save is not None:
        others = [entry for entry in load(save) if entry["kind"] != here]
        before: dict[str, int] = next((e["counts"] for e in load(save) if e["kind"] == here), {})
        entries = [*others, {"kind": here, "date": machine.now(), "counts": {**before, **found}}]
        save.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        console.print(f"saved {len(found)} counts to {save}", markup=False, soft_wrap=True)
        return 0
    worse = [
        name for name in found if name in committed and is_worse(name, found[name], committed[name])
    ]
    return 1 if worse else 0


def _print(found: dict[str, int], committed: dict[str, int], console: Console) -> None:
    table = Table(
        "row", "instructions", "/ committed", "verdict", title="instructions", title_justify="left"
    )
    for name, count in found.items():
        if name not in committed:
            table.add_row(escape(name), f"{count:,}", "–", "new")
            continue
        worse = is_worse(name, count, committed[name])
        better = is_worse(name, committed[name], count)
        verdict = "[red]worse[/]" if worse else "[green]better[/]" if better else "fine"
        table.add_row(escape(name), f"{count:,}", f"{count / committed[name]:.3f}", verdict)
    console.print(table)
    console.print(
        f"worse is {SLACK:.1%} above the committed count, of small calls {SLACK_OF_SMALL:.0%}"
    )
