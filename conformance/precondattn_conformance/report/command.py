"""`precondattn compare`: compares two records, of conformance or of benchmarks."""

from __future__ import annotations

from math import inf
from pathlib import Path

from rich.console import Console

from precondattn_conformance.report.compare import compare_records, print_comparison
from precondattn_conformance.report.record import is_record, load


def compare(old: Path, new: Path, *, threshold: float, growth: float, console: Console) -> int:
    """Print what changed between two records; returns exit code 1 if something is worse.

    Raises
    ------
    ValueError
        if one of them is not a record, or they are records of different kinds.
    """
    if not 1 <= growth < inf:
        raise ValueError(f"growth must be 1 or above; found {growth}")
    if not 0 <= threshold < inf:
        raise ValueError(f"threshold must be 0 or above; found {threshold}")
    kinds = {path: is_record(path) for path in (old, new)}
    if not any(kinds.values()):
        from precondattn_conformance.bench import command

        return command.compare(old, new, threshold, console)
    for path, is_one in kinds.items():
        other = new if path == old else old
        if not is_one and path.exists():
            raise ValueError(
                f"{other} is a record of a conformance run and {path} is not; "
                "only two of the same kind can be compared"
            )
    comparison = compare_records(load(old), load(new), growth)
    print_comparison(comparison, console)
    return 1 if comparison.is_worse else 0
