"""A layer, and the same computed by a peer: both compared, and ready to be timed."""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Arrays
from precondattn_conformance.bench.correct import Checked, WrongResultError
from precondattn_conformance.bench.paired import Run
from precondattn_conformance.libraries import Library
from precondattn_conformance.tolerance import error


class Beside(NamedTuple):
    """Our run and the peer's, both correct."""

    ours: Run
    peer: Run
    peer_name: str
    checked: Checked
    peer_error: float | None
    """None if the peer's result is what ours is compared with."""
    first_call_seconds: float


def worst(which: str, results: Arrays, expected: Arrays, library: Library, limit: float) -> float:
    """The largest error of the results. Raises `WrongResultError` if it is above the limit."""
    errors = {
        name: error(library.numpy(results[name]), library.numpy(wanted))
        for name, wanted in expected.items()
    }
    for name, own in errors.items():
        if not own <= limit:
            raise WrongResultError(f"{name} of {which}", own, limit)
    return max(errors.values())
