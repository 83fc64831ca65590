"""Outcomes and records of conformance runs, as reports read them."""

import io
import math
from types import SimpleNamespace
from typing import NamedTuple

from rich.console import Console

from precondattn_conformance.checks.check import Measured
from precondattn_conformance.report.record import RecordWriter, load

HOSTILE = (
    "</script><script>alert('&')</script> ]]> \" onmouseover=x \x1b[31mred\x1b[0m \x00\x07 \ud800"
)


REFUSAL = """lucid: the requested backend mine does not support all of it
  y = lucid_solve(k, v)
    mine: takes widths that are powers of two; found 5
  out = softmax(q, k, v=y)
    mine: takes widths that are powers of two; found 5
    other: is for GPUs"""


class CaseLayout(NamedTuple):
    name: str
    t: int = 7
    mask: str | None = None


def an_outcome(status="passed", error=1e-6, bound=2e-5, **changed):
    """An outcome of the runner, in the form that reports read."""
    parts = {"check": "outputs", "mechanism": "lucid", "library": "torch", "dtype": "float32"}
    parts |= {name: changed.pop(name) for name in list(changed) if name in parts}
    layout, kind = CaseLayout(changed.pop("layout", "plain")), "clustered"
    identity = changed.pop("id", "-".join((*parts.values(), layout.name, kind)))
    measured = None
    if error is not None:
        measured = Measured(error, bound)
    texts = {"reason": "", "details": "", "snippet": "", "seconds": 0.1, "alone": "", "after": ()}
    texts |= changed
    return SimpleNamespace(
        case=SimpleNamespace(id=identity, layout=layout, kind=kind, **parts),
        status=status,
        measured=measured,
        **texts,
    )


def a_failure(**changed):
    texts = {
        "reason": "the output is off by 0.5 (bound 2e-05)\nworst at (0, 1)",
        "details": "  0 1\n0 . #",
        "snippet": "print('β')",
        "alone": "passed",
        "after": ("outputs-torch-float32-plain-clustered-softmax",),
    }
    return an_outcome("failed", **{"error": 0.5, **texts, **changed})


def of_every_status(**changed):
    """One outcome of each status, some with errors of NaN and infinity."""
    return [
        an_outcome(**changed),
        a_failure(layout="ragged", **changed),
        a_failure(layout="nan", error=math.nan, **changed),
        a_failure(layout="inf", error=math.inf, **changed),
        a_failure(layout="raised", **{**changed, "error": None}),
        an_outcome("xfailed", layout="known", reason="issue 41", **changed),
        an_outcome("unsupported", layout="odd", reason=REFUSAL, **{**changed, "error": None}),
        an_outcome("skipped", layout="big", reason="too large", **{**changed, "error": None}),
    ]


def writer(path, **changed):
    chosen = {"level": "smoke", "device": None, "filters": {"mechanism": ("lucid",)}}
    return RecordWriter(path, **{"backends": ("mine",), **chosen, **changed})


def recorded(outcomes, path=None, *, backends=("mine",), **changed):
    """The record of these outcomes, written to the file and read from it if a path is given."""
    with writer(path, backends=backends, **changed) as recording:
        for outcome in outcomes:
            recording.started(outcome.case)
            recording.add(outcome)
    return recording.record if path is None else load(path)


def printed_by(print_it, width=80):
    printed = io.StringIO()
    print_it(Console(file=printed, width=width))
    return printed.getvalue()


def replace_texts(outcome, changed):
    case = SimpleNamespace(**{**vars(outcome.case), **changed})
    return SimpleNamespace(**{**vars(outcome), **changed, "case": case})
