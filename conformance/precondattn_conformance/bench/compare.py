"""Comparison of two records: which ratios to a peer, peaks and results have become worse.

A ratio has regressed if the new median is more than the threshold above the old one, and the two
interquartile ranges do not overlap; a peak, if it is more than the threshold larger; a case, if it
had a time and has none now. Times are shown, and not judged: the machine had another speed then.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn_conformance.bench.record import TIMED, BenchRecord, Row

REGRESSED, IMPROVED, SAME, NEW, GONE = "regressed", "improved", "same", "new", "gone"
UNCOMPARED = "not comparable by ratio"
"""The verdict on a row that has times and no ratio to the same peer in both records."""


class Change(NamedTuple):
    """The change of a row from the old record to the new one."""

    name: str
    verdict: str
    text: str
    ratios: tuple[tuple[str, float, float], ...] = ()
    """Peers that both records have, with the old ratio and the new one."""
    time: float | None = None
    """New time / old time, which is not judged."""


def changes(old: BenchRecord, new: BenchRecord, threshold: float) -> list[Change]:
    """The changes of all rows of either record."""
    before, after = ({row.key: row for row in record.rows} for record in (old, new))
    changed = [
        _change(before[key], row, threshold) if key in before else Change(row.name, NEW, "")
        for key, row in after.items()
    ]
    return changed + [Change(row.name, GONE, "") for k, row in before.items() if k not in after]


def _change(old: Row, new: Row, threshold: float) -> Change:
    if old.status == TIMED and new.status != TIMED:
        return Change(new.name, REGRESSED, f"{new.status}: {new.reason}")
    verdicts, texts, ratios = set(), [], []
    before, after = _measured(old), _measured(new)
    for peer in (peer for peer in after if peer in before):
        then, now = before[peer], after[peer]
        ratios.append((peer, then["median"], now["median"]))
        factor = now["median"] / then["median"]
        is_worse = factor > 1 + threshold and now["q1"] > then["q3"]
        if is_worse or (factor < 1 / (1 + threshold) and now["q3"] < then["q1"]):
            verdicts.add(REGRESSED if is_worse else IMPROVED)
            texts.append(f"{factor:.2f} x the ratio to {peer}")
    old_peaks = dict(zip(old.peak_tokens, old.peak_bytes, strict=True))
    for tokens, peak in zip(new.peak_tokens, new.peak_bytes, strict=True):
        if tokens in old_peaks and peak > (1 + threshold) * old_peaks[tokens]:
            verdicts.add(REGRESSED)
            texts.append(f"{peak / old_peaks[tokens]:.2f} x the memory at t={tokens}")
    time = None
    if old.seconds and new.seconds:
        time = new.seconds["median"] / old.seconds["median"]
        texts += [
            f"no ratio to {peer} now: {new.absent_peers.get(peer, 'it was not measured')}"
            for peer in before
            if peer not in after
        ]
    verdict = UNCOMPARED if time is not None and not ratios else SAME
    verdict = next((each for each in (REGRESSED, IMPROVED) if each in verdicts), verdict)
    return Change(new.name, verdict, "; ".join(texts), tuple(ratios), time)


def _measured(row: Row) -> dict[str, dict[str, float]]:
    """The ratios that were measured; a peer may have an error alone."""
    return {peer: ratio for peer, ratio in row.ratios.items() if "median" in ratio}


def machines_differ(old: BenchRecord, new: BenchRecord) -> list[str]:
    """The differences between the machines of two records, which change ratios too."""
    names = ("processor", "cores", "threads", "system", "neighbours")
    pairs = [(name, old.machine.get(name), new.machine.get(name)) for name in names]
    then, now = (
        versions if isinstance(versions := record.machine.get("versions"), dict) else {}
        for record in (old, new)
    )
    # The versions of the libraries to which peers belong.
    pairs += [(n, then[n], now[n]) for n in then if n in now and n != "precondattn"]
    return [f"{name}: {a} before, {b} now" for name, a, b in pairs if a != b]
