"""Two records: what began to fail, what was mended, what is covered now, which errors grew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from precondattn_conformance.report.record import Record
from precondattn_conformance.report.result import Result, share_text
from precondattn_conformance.status import FAILED, PASSED, XFAILED

FACTOR = 3.0
"""An error that has grown by less is noise: another device, another order of sums."""

NOTEWORTHY = 0.1
"""As a share of its bound: a smaller error may grow as it likes."""

SHOWN = 20


class Difference(NamedTuple):
    """A case, and what came of it before and now; None where a record does not have it."""

    id: str
    old: Result | None
    new: Result | None


@dataclass
class Comparison:
    """The cases in which two records differ, by kind. A case is in one list only."""

    began_to_fail: list[Difference] = field(default_factory=list)
    """It fails now, and did not fail or was not there."""
    lost: list[Difference] = field(default_factory=list)
    """It was compared and is not any more, whatever came of it."""
    grew: list[Difference] = field(default_factory=list)
    """It passes, but its error is larger by more than the factor."""
    excused: list[Difference] = field(default_factory=list)
    """It is an expected failure now."""
    mended: list[Difference] = field(default_factory=list)
    """It failed, expectedly or not, and passes."""
    gained: list[Difference] = field(default_factory=list)
    """It is compared now."""
    only_old: list[Difference] = field(default_factory=list)
    only_new: list[Difference] = field(default_factory=list)
    """And it does not fail."""
    same: int = 0
    surroundings: list[str] = field(default_factory=list)
    """What else differs: versions, devices, filters."""

    @property
    def is_worse(self) -> bool:
        """Whether something fails, is lost, or is less exact."""
        return bool(self.began_to_fail or self.lost or self.grew)


def compare_records(old: Record, new: Record, factor: float = FACTOR) -> Comparison:
    """What has become of every case of either record."""
    before = {result.id: result for result in old.outcomes}
    after = {result.id: result for result in new.outcomes}
    comparison = Comparison(surroundings=_surroundings(old, new))
    for name in {**before, **after}:
        difference = Difference(name, before.get(name), after.get(name))
        kind = _kind(difference, factor)
        if kind == "same":
            comparison.same += 1
        else:
            getattr(comparison, kind).append(difference)
    return comparison


def _kind(difference: Difference, factor: float) -> str:
    """The list of a comparison that a case belongs to."""
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
        return "mended"
    return "grew" if _grew(old, new, factor) else "same"


def _grew(old: Result, new: Result, factor: float) -> bool:
    if not (old.status == new.status == PASSED) or new.share is None or old.error is None:
        return False
    return new.share > NOTEWORTHY and (new.error or 0.0) > factor * old.error


def _surroundings(old: Record, new: Record) -> list[str]:
    """In what two runs differ, other than in what came of their cases."""
    told = []
    for what, record in (("old", old), ("new", new)):
        if not record.complete:
            where = f"; it was running {record.running}" if record.running else ""
            told.append(f"the {what} record is not complete{where}")
    before, after = _described(old), _described(new)
    for name in {**before, **after}:
        was, now = before.get(name, "none"), after.get(name, "none")
        if was != now:
            told.append(f"{name}: {was} before, {now} now")
    return told


def _described(record: Record) -> dict[str, str]:
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
    "mended": ("were mended", "green"),
    "gained": ("are compared now", "green"),
    "only_old": ("are only in the old record", "default"),
    "only_new": ("are only in the new record", "default"),
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What differs, the bad first."""
    for text in comparison.surroundings:
        _say(console, text, "dim")
    for name, (heading, style) in HEADINGS.items():
        differences = getattr(comparison, name)
        if not differences:
            continue
        _say(console, f"{len(differences)} {heading}", style)
        for difference in differences[:SHOWN]:
            _say(console, f"  {difference.id}")
            about = _about(name, difference)
            if about:
                _say(console, f"    {about}", "dim")
        if len(differences) > SHOWN:
            _say(console, f"  and {len(differences) - SHOWN} more", "dim")
    _say(console, f"{comparison.same} as before")


def _about(kind: str, difference: Difference) -> str:
    """What is worth a line more."""
    old, new = difference.old, difference.new
    if kind == "grew" and old is not None and new is not None:
        factor = new.error / old.error if new.error and old.error else float("inf")
        change = f"{old.error:.2g} before, {new.error:.2g} now ({factor:.3g}×)"
        share = f"{share_text(new.share or 0.0)} of its bound {new.bound:.2g}"
        moved = f", which was {old.bound:.2g}" if old.bound != new.bound else ""
        return f"{change}, {share}{moved}"
    if kind in ("began_to_fail", "lost", "excused") and new is not None:
        return f"{new.status}: {new.headline}" if new.headline else new.status
    return ""


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
