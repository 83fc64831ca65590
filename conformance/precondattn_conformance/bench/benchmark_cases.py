"""The rows of a user's test that pytest-benchmark times: which calls, and which peers beside them.

    @benchmark_cases(mechanisms=["lucid"], libraries=["torch", "jax"])
    def test_attention(benchmark, checked_attention):
        benchmark(checked_attention)

The decorator holds the choice. The plugin makes the rows of it when pytest collects the test,
because the device is an option of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from precondattn.arrays import Arrays
from precondattn.backend import UnsupportedError
from precondattn.dispatch.discovery import discover
from precondattn.given import Arguments
from precondattn_conformance import libraries as array_libraries
from precondattn_conformance.bench.cases import BenchCase, Columns, columns_of, device_on
from precondattn_conformance.bench.command import require_extra
from precondattn_conformance.bench.correct import UncheckedError, WrongResultError
from precondattn_conformance.bench.measure import empty_row, our_run, peer_run
from precondattn_conformance.bench.peers import TimedPeer, lacks, peers_of
from precondattn_conformance.bench.selection import Selection

if TYPE_CHECKING:
    import pytest
    from pytest_benchmark.fixture import BenchmarkFixture

WORKS = ("forward", "forward_backward", "decode")
"""What can be timed here; memory is no time."""

DEFAULT = "default"
"""The backend of a call for which no backend is named."""

NEVER = ("torch",)
"""Peers that are no rows here: `libraries=["torch"]` is the same."""

OURS = ("base", "batch", "gated_delta", "kda")
"""Peers that are mechanisms of this library; they are rows only where they are named."""


class BenchmarkRow(NamedTuple):
    """One call to be timed: ours on a backend, or a peer's."""

    columns: Columns
    case: BenchCase
    peer: TimedPeer | None
    computed: str
    """What it computes: the mechanism of the case, or another one if it is a peer."""
    lack: str
    """Why it can not run here; empty if it can."""

    @property
    def id(self) -> str:
        return self.columns.id(self.computed)


def benchmark_cases(
    *names: str,
    mechanisms: Sequence[str] = (),
    libraries: Sequence[str] = (),
    backends: Sequence[str] = (DEFAULT,),
    works: Sequence[str] = (),
    sizes: Sequence[str] = (),
    dtype: str | None = None,
    peers: Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """A decorator that gives a test one row for each call to be timed by pytest-benchmark.

    The test takes the fixtures `benchmark`, of pytest-benchmark, and `checked_attention`, a call
    without arguments whose result has been compared with the oracle.

    Parameters
    ----------
    *names
        cases that `precondattn bench --list` names; `*` matches any text. Instead of `mechanisms`.
    mechanisms
        expressions, such as `"lucid"` or `"ccq(gated_delta)"`.
    libraries
        array libraries: `"torch"` (the default), `"jax"`, `"numpy"`, `"cupy"`.
    backends
        backends to time; `"default"` is the one that a call without `backend=` uses. A backend has
        rows on the libraries that it declares.
    works
        `"forward"` (the default), `"forward_backward"` or `"decode"`.
    sizes
        such as `"t=1024,h=4,d=64"`, one row for each; other sizes are b=1, t=4096, h=8, d=64.
    dtype
        `"float32"` by default.
    peers
        what to time beside: names of the page on benchmarks. By default every implementation of
        other projects that fits the mechanism and can run here; `[]` is none.

    Raises
    ------
    ValueError, TypeError
        for something that does not exist.
    ImportError
        if pytest-benchmark is not installed.
    """
    require_extra("pytest_benchmark")
    import pytest

    lists: Arguments = {"mechanisms": mechanisms, "libraries": libraries, "works": works}
    lists |= {"backends": backends, "sizes": sizes} | ({} if peers is None else {"peers": peers})
    for argument, texts in lists.items():
        if isinstance(texts, str):
            raise TypeError(f"{argument} is a list of texts; write [{texts!r}]")
        lists[argument] = tuple(texts)
    if not names and not mechanisms:
        raise ValueError("name cases, or mechanisms=[...]")
    selection = Selection(names, dtype=dtype, **lists)
    _require_valid(selection)
    return pytest.mark.precondattn_benchmark(selection)  # The plugin reads this mark.


def _require_valid(selection: Selection) -> None:
    for work in selection.works:
        if work not in WORKS:
            raise ValueError(
                f"work {work!r} is not timed by pytest-benchmark; those that are: "
                f"{', '.join(WORKS)} (`precondattn bench` measures the others)"
            )
    cases = _timed_cases(selection)
    if not cases:
        raise ValueError(f"none of the requested cases is one of {', '.join(WORKS)}")
    for case in cases:
        _runs_on_its_library(case)
    of_cases = {peer.name for case in cases for peer in peers_of(case)}
    for name in selection.peers or ():
        if name in NEVER:
            raise ValueError(f"{name!r} is no peer here: add it to the libraries")
        if name not in of_cases:
            raise ValueError(f"{name} is no peer of {', '.join({c.mechanism for c in cases})}")


def _timed_cases(selection: Selection) -> list[BenchCase]:
    return [
        # pytest-benchmark repeats short calls itself.
        replace(case, calls=1, backend=None if case.backend == DEFAULT else case.backend)
        for case in selection.cases()
        if case.work in WORKS
    ]


@lru_cache
def rows_of(
    selection: Selection, device: str | None = None, *, quick: bool = False
) -> tuple[BenchmarkRow, ...]:
    """The rows of a test, group by group: ours first, then the peers of the group, once each.

    Where no library has this device, that is a `ValueError`.
    """
    cases = _timed_cases(replace(selection, device=device, quick=quick))
    missing = [_lack_of(case.library, device) for case in cases]
    if all("has no device" in lack for lack in missing):
        raise ValueError("; ".join(dict.fromkeys(missing)))
    named = next((backend for backend in selection.backends if backend != DEFAULT), None)
    rows = [
        BenchmarkRow(columns_of(case), case, None, str(case.parsed), lack)
        for case, lack in zip(cases, missing, strict=True)
        if _runs_on_its_library(case)
    ]
    for case in cases:
        left_out = NEVER if case.peers is not None else NEVER + OURS
        for peer in (peer for peer in peers_of(case) if peer.name not in left_out):
            columns, computed = columns_of(case, peer), str(peer.computes(case.parsed))
            lack = lacks(peer, case, columns.device) or _lack_of(columns.library, device)
            if not lack or case.peers is not None:
                case_of_peer = replace(case, backend=named)
                rows.append(BenchmarkRow(columns, case_of_peer, peer, computed, lack))
    groups: dict[str, dict[Columns, BenchmarkRow]] = {}
    for row in rows:
        groups.setdefault(row.columns.group, {}).setdefault(row.columns, row)
    return tuple(row for group in groups.values() for row in group.values())


def _runs_on_its_library(case: BenchCase) -> bool:
    """Whether the backend of a case, or the first of several, declares the library of the case."""
    if case.backend is None:
        return True
    backend, *_ = (discover().named(name) for name in case.backend.split(","))
    return not backend.libraries or case.library in backend.libraries


def _lack_of(library: str, device: str | None) -> str:
    """Why a library can not run here, or not on this device; empty if it can."""
    if not array_libraries.named(library).is_installed():
        return f"{library} can not be used here"
    try:
        array_libraries.require_device([library], device and device_on(library, device))
    except ValueError as error:
        return str(error)
    return ""


@contextmanager
def checked_attention(
    row: BenchmarkRow, benchmark: BenchmarkFixture
) -> Iterator[Callable[[], Arrays]]:
    """The call of a row, while the dtype of the row is enabled in its library.

    A row that can not run is skipped. A wrong result fails the test before anything is timed; a
    wrong peer is skipped, because it is no fault of what is compared with it.
    """
    import pytest

    case, peer = replace(row.case, device=row.columns.device), row.peer
    benchmark.group, described = row.columns.group, empty_row(case)
    with replace(case, library=row.columns.library).arrays.precision(case.dtype):
        try:
            run, checked, seconds = peer_run(peer, case) if peer else our_run(case, described)
        except (UnsupportedError, UncheckedError) as reason:
            pytest.skip(str(reason))
        except WrongResultError as wrong:
            benchmark.skipped = True  # Otherwise the fixture warns that it was not used.
            text = f"{wrong}: a wrong result is not timed"
            if peer is not None:
                pytest.skip(text)
            pytest.fail(text, pytrace=False)
        except Exception:
            benchmark.skipped = True
            raise
        benchmark.extra_info |= {
            "case": case.name, "computes": row.computed, "is_peer": peer is not None,
            "backends": described.backends, "device": described.device, "checked": checked.what,
            "error": checked.error, "bound": checked.bound, "first_call_seconds": seconds,
        }  # fmt: skip

        def call() -> Arrays:
            run.reset()
            return run.call()

        yield call
