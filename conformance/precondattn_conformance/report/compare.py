"""Comparison of two records: new failures, fixed failures, changed coverage, larger errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from precondattn_conformance.report.record import RunRecord, is_record, load
from precondattn_conformance.report.result import Result, share_text
from precondattn_conformance.status import FAILED, PASSED, XFAILED

FACTOR = 3.0
"""Growth of an error by a smaller factor counts as noise (other device, other order of sums)."""

NOTEWORTHY = 0.1
"""Growth of errors below this share of their bound is ignored."""

SHOWN = 20


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


class CaseDifference(NamedTuple):
    """A case and its results in both records; None if a record does not have the case."""

    id: str
    old: Result | None
    new: Result | None


@dataclass
class Comparison:
    """The cases in which two records differ."""

    environment: list[str]
    """Other differences: versions, devices, filters."""
    by_kind: dict[str, list[CaseDifference]] = field(default_factory=dict)
    """The cases of each of `HEADINGS`. A case is in one list only."""
    same: int = 0

    @property
    def is_worse(self) -> bool:
        """Whether a case began to fail, is no longer compared, or has a larger error."""
        return not self.by_kind.keys().isdisjoint(("began_to_fail", "lost", "grew"))


def compare_records(old: RunRecord, new: RunRecord, factor: float = FACTOR) -> Comparison:
    """The differences between two records, for every case of either."""
    before = {result.id: result for result in old.outcomes}
    after = {result.id: result for result in new.outcomes}
    comparison = Comparison(_environment(old, new))
    for name in {**before, **after}:
        difference = CaseDifference(name, before.get(name), after.get(name))
        kind = _kind(difference, factor)
        if kind == "same":
            comparison.same += 1
        else:
            comparison.by_kind.setdefault(kind, []).append(difference)
    return comparison


def _kind(difference: CaseDifference, factor: float) -> str:
    """The list of a comparison to which a case belongs."""
    old, new = difference.old, difference.new
    if new is None:
        return "only_old"
    if new.status == FAILED and (old is None or old.status != FAILED):
        return "began_to_fail"
    if old is None:
        return "only_new"
    if old.is_compared and not new.is_compared:
        return "lost"
    if new.status == XFAILED and old.status != XFAILED:
        return "excused"
    if new.is_compared and not old.is_compared:
        return "gained"
    if new.status == PASSED and old.status in (FAILED, XFAILED):
        return "fixed"
    return "grew" if _grew(old, new, factor) else "same"


def _grew(old: Result, new: Result, factor: float) -> bool:
    if not (old.status == new.status == PASSED) or new.share is None or old.error is None:
        return False
    return new.share > NOTEWORTHY and (new.error or 0.0) > factor * old.error


def _environment(old: RunRecord, new: RunRecord) -> list[str]:
    """The differences between two runs other than their results."""
    lines = []
    for what, record in (("old", old), ("new", new)):
        if not record.complete:
            where = f"; it was running {record.running}" if record.running else ""
            lines.append(f"the {what} record is not complete{where}")
    before, after = _described(old), _described(new)
    for name in {**before, **after}:
        was, now = before.get(name, "none"), after.get(name, "none")
        if was != now:
            lines.append(f"{name}: {was} before, {now} now")
    return lines


def _described(record: RunRecord) -> dict[str, str]:
    about = record.environment
    revision = about.get("revision") or {}
    described = {
        "suite": record.suite,
        "backends": ", ".join(_backend(each) for each in record.backends) or "default",
        "level": record.level,
        "device": record.device or "default",
        "python": str(about.get("python", "")),
        "processor": str(about.get("processor", "")),
        "revision": str(revision.get("commit", "none"))[:12],
    }
    described |= {f"only {name}": ", ".join(each) for name, each in record.filters.items()}
    for group in ("accelerators", "drivers", "versions", "settings"):
        named = about.get(group) or {}
        described |= {f"{group} {name}": str(value) for name, value in named.items()}
    return described


def _backend(backend: dict[str, str]) -> str:
    return " ".join(backend[part] for part in ("name", "version") if part in backend)


HEADINGS = {
    "began_to_fail": ("began to fail", "red"),
    "lost": ("are not compared any more", "red"),
    "grew": ("have a larger error", "yellow"),
    "excused": ("are expected to fail now", "yellow"),
    "fixed": ("were fixed", "green"),
    "gained": ("are compared now", "green"),
    "only_old": ("are only in the old record", "default"),
    "only_new": ("are only in the new record", "default"),
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the differences, the worst kinds first."""
    for text in comparison.environment:
        _print(console, text, "dim")
    for name, (heading, style) in HEADINGS.items():
        differences = comparison.by_kind.get(name)
        if not differences:
            continue
        _print(console, f"{len(differences)} {heading}", style)
        for difference in differences[:SHOWN]:
            _print(console, f"  {difference.id}")
            about = _about(name, difference)
            if about:
                _print(console, f"    {about}", "dim")
        if len(differences) > SHOWN:
            _print(console, f"  and {len(differences) - SHOWN} more", "dim")
    _print(console, f"{comparison.same} as before")


def _about(kind: str, difference: CaseDifference) -> str:
    """Further information on a difference; may be empty."""
    old, new = difference.old, difference.new
    if kind == "grew" and old is not None and new is not None:
        factor = new.error / old.error if new.error and old.error else float("inf")
        change = f"{old.error:.2g} before, {new.error:.2g} now ({factor:.3g}x)"
        share = f"{share_text(new.share or 0.0)} of its bound {new.bound:.2g}"
        changed_bound = f", which was {old.bound:.2g}" if old.bound != new.bound else ""
        return f"{change}, {share}{changed_bound}"
    if kind in ("began_to_fail", "lost", "excused") and new is not None:
        return f"{new.status}: {new.headline}" if new.headline else new.status
    return ""


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
