"""The gate: which ratios to peers have become worse than the committed ones.

Each row is a case at a third of its size, beside one peer, in turns (`ROWS`). A ratio is worse if
the lower bound of its interval is above

    (1 + SLACK) · upper bound of the committed interval,

in the first measurement and in two more. These are taken after all other rows, so that a
disturbance of seconds is over. A time alone decides nothing. Times are the processor's, on one
thread.

A row is not judged, but printed, if no ratio is committed for this kind of machine, or if the
machine is busy when the row seems worse: a large matrix product is slower than `IDLE` of what it
was when the ratios were committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from precondattn_conformance.bench.bootstrap import Interval
from precondattn_conformance.bench.cases import COMPARED, BenchCase

ROWS = {
    "lucid": "sdpa",
    "lucid_one_kv_head": "sdpa",
    "lucid_backward": "sdpa",
    "laser": "sdpa",
    "laser_backward": "sdpa",
    "gated_delta": "transformers",
    "gated_delta_backward": "transformers",
    "ccq_gated_delta": "base",
    "path": "sdpa",
    "window_backward": "masked_sdpa",
    "jax_softmax": "sdpa",
    "jax_lucid": "sdpa",
    "jax_lucid_backward": "sdpa",
    "numpy_lucid": "base",
    "packed_lucid": "batch",
    "lucid_decode": "sdpa",
}
"""The peer of each row, by the name of the case."""

SLACK = 0.05
RERUNS = 2
SAVED_RUNS = 3
IDLE = 0.8

FINE, WORSE, BETTER, UNKNOWN, LOST, BUSY = "fine", "worse", "better", "new", "lost", "not judged"
FAILING = (WORSE, LOST)

Measured = Interval | str
"""A ratio, or the reason why there is none."""


class GateOutcome(NamedTuple):
    """One row: what it was measured to be, each time, and what follows."""

    name: str
    verdict: str
    measured: tuple[Measured, ...]
    committed: Interval | None


def rows(names: Iterable[str] = ()) -> list[BenchCase]:
    """The cases of the gate, or some of them, at a third of their size.

    Raises
    ------
    ValueError
        for a name that is no row.
    """
    wanted = tuple(names) or tuple(ROWS)
    for name in wanted:
        if name not in ROWS:
            raise ValueError(f"{name!r} is no row of the gate; these are {', '.join(ROWS)}")
    return [_third(case) for case in COMPARED if case.name in wanted]


def _third(case: BenchCase) -> BenchCase:
    sizes = case.layout
    if case.packed:
        smaller = sizes._replace(b=sizes.b // 3)
    else:
        smaller = sizes._replace(t=sizes.t // 3, s=sizes.t // 3)
    return replace(case, layout=smaller, peers=(ROWS[case.name],))


def judge(now: Measured, committed: Interval | None) -> str:
    """The verdict of one measurement."""
    if isinstance(now, str):
        return UNKNOWN if committed is None else LOST
    if committed is None:
        return UNKNOWN
    if now.low > (1 + SLACK) * committed.high:
        return WORSE
    return BETTER if (1 + SLACK) * now.high < committed.low else FINE


def outcomes(
    cases: list[BenchCase],
    measure: Callable[[BenchCase], Measured],
    committed: dict[str, Interval],
    is_idle: Callable[[], bool],
) -> list[GateOutcome]:
    """Every row judged. Those that seem worse are measured again, after all others."""
    measured = {case.name: [measure(case)] for case in cases}

    def verdict(name: str) -> str:
        verdicts = [judge(each, committed.get(name)) for each in measured[name]]
        return WORSE if all(each == WORSE for each in verdicts) else verdicts[-1]

    idle = True
    for _ in range(RERUNS):
        for case in [case for case in cases if verdict(case.name) == WORSE]:
            idle = is_idle() and idle
            measured[case.name].append(measure(case))
            idle = is_idle() and idle
    found = []
    for name, each in measured.items():
        final = BUSY if verdict(name) == WORSE and not idle else verdict(name)
        found.append(GateOutcome(name, final, tuple(each), committed.get(name)))
    return found


def envelope(runs: list[Measured]) -> Interval | None:
    """What is committed of a row: the widest bounds of some runs, and the median ratio.

    None if a run has no ratio.
    """
    intervals = [run for run in runs if isinstance(run, Interval)]
    if not intervals or len(intervals) < len(runs):
        return None
    return Interval(
        median(each.ratio for each in intervals),
        min(each.low for each in intervals),
        max(each.high for each in intervals),
    )
