"""Comparison of two records of one machine: what has become slower, or larger, beyond noise.

A time has regressed if the new median is more than the threshold above the old one, and the two
interquartile ranges do not overlap. A peak has regressed if it is more than the threshold larger. A
case that had a time and has none now, because it is wrong or fails, has regressed too.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn_conformance.bench.record import TIMED, BenchRecord, Row

REGRESSED, IMPROVED, SAME, NEW, GONE = "regressed", "improved", "same", "new", "gone"


class Change(NamedTuple):
    """The change of a row from the old record to the new one."""

    name: str
    verdict: str
    text: str
    factor: float | None = None
    """New time / old time."""


def changes(old: BenchRecord, new: BenchRecord, threshold: float) -> list[Change]:
    """The changes of all rows of either record."""
    before = {row.key: row for row in old.rows}
    after = {row.key: row for row in new.rows}
    changed = [
        _change(before[key], row, threshold) if key in before else Change(row.name, NEW, "")
        for key, row in after.items()
    ]
    changed += [Change(row.name, GONE, "") for key, row in before.items() if key not in after]
    return changed


def _change(old: Row, new: Row, threshold: float) -> Change:
    if old.status == TIMED and new.status != TIMED:
        return Change(new.name, REGRESSED, f"{new.status}: {new.reason}")
    factor, verdicts, texts = None, set(), []
    if old.seconds and new.seconds:
        factor = new.seconds["median"] / old.seconds["median"]
        if factor > 1 + threshold and new.seconds["q1"] > old.seconds["q3"]:
            verdicts.add(REGRESSED)
            texts.append(f"{factor:.2f} × the time")
        if factor < 1 / (1 + threshold) and new.seconds["q3"] < old.seconds["q1"]:
            verdicts.add(IMPROVED)
            texts.append(f"{factor:.2f} × the time")
    old_peaks = dict(zip(old.peak_tokens, old.peak_bytes, strict=True))
    for tokens, peak in zip(new.peak_tokens, new.peak_bytes, strict=True):
        if tokens in old_peaks and peak > (1 + threshold) * old_peaks[tokens]:
            verdicts.add(REGRESSED)
            texts.append(f"{peak / old_peaks[tokens]:.2f} × the memory at t={tokens}")
    verdict = REGRESSED if REGRESSED in verdicts else IMPROVED if verdicts else SAME
    return Change(new.name, verdict, "; ".join(texts), factor)


def machines_differ(old: BenchRecord, new: BenchRecord) -> list[str]:
    """The differences between the machines of two records, which make times incomparable."""
    properties = ("processor", "cores", "threads", "system", "neighbours")
    return [
        f"{name}: {old.machine.get(name)} before, {new.machine.get(name)} now"
        for name in properties
        if old.machine.get(name) != new.machine.get(name)
    ]
