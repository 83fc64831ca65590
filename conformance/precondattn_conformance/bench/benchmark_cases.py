"""The rows of a user's test that pytest-benchmark times: which calls, and which peers beside them.

    @benchmark_cases(mechanisms=["lucid"], libraries=["torch", "jax"])
    def test_attention(benchmark, checked_attention):
        benchmark(checked_attention)

The decorator holds the choice. The plugin makes the rows of it when pytest collects the test,
because the device is an option of the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import precondattn as pa
from precondattn.dispatch.discovery import discover
from precondattn.installed import is_installed
from precondattn_conformance import libraries as array_libraries
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.columns import DEFAULT, Columns, columns_of, device_on
from precondattn_conformance.bench.mark import BENCHMARKED
from precondattn_conformance.bench.peers import TimedPeer, computed_by, lacks, peers_of
from precondattn_conformance.bench.selection import chosen

if TYPE_CHECKING:
    import pytest

WORKS = ("forward", "forward_backward", "decode")
"""What can be timed here; memory is no time."""

NEVER = ("torch",)
"""Peers that are no rows here: `libraries=["torch"]` is the same."""

OURS = ("base", "batch", "gated_delta", "kda")
"""Peers that are mechanisms of this library; they are rows only where they are named."""


@dataclass(frozen=True)
class Selection:
    """What a test requests."""

    names: tuple[str, ...] = ()
    mechanisms: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    backends: tuple[str, ...] = (DEFAULT,)
    works: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    dtype: str | None = None
    peers: tuple[str, ...] | None = None

    def cases(self, *, quick: bool = False) -> list[BenchCase]:
        """The requested cases. Raises `ValueError` for a name that does not exist."""
        found = chosen(
            self.names,
            mechanisms=self.mechanisms,
            works=self.works,
            libraries_=self.libraries,
            sizes=self.sizes,
            dtype=self.dtype,
            peers=self.peers,
            quick=quick,
        )
        # pytest-benchmark repeats short calls itself.
        return [replace(case, calls=1) for case in found if case.work in WORKS]


class BenchmarkRow(NamedTuple):
    """One call to be timed: ours on a backend, or a peer's."""

    columns: Columns
    case: BenchCase
    backend: str | None
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
    if not is_installed("pytest_benchmark"):
        raise ImportError(
            "benchmarks need pytest-benchmark, which is not installed; install precondattn with "
            "its extra 'bench'"
        )
    import pytest

    given = {"mechanisms": mechanisms, "libraries": libraries, "backends": backends}
    given |= {"works": works, "sizes": sizes}
    for argument, texts in {**given, "peers": peers}.items():
        if isinstance(texts, str):
            raise TypeError(f"{argument} is a list of texts; write [{texts!r}]")
    if not names and not mechanisms:
        raise ValueError("name cases, or mechanisms=[...]")
    selection = Selection(
        names=names,
        **{argument: tuple(texts) for argument, texts in given.items()},
        dtype=dtype,
        peers=None if peers is None else tuple(peers),
    )
    _require_valid(selection)
    mark: pytest.MarkDecorator = getattr(pytest.mark, BENCHMARKED)(selection)
    return mark


def _require_valid(selection: Selection) -> None:
    for work in selection.works:
        if work not in WORKS:
            raise ValueError(
                f"work {work!r} is not timed by pytest-benchmark; those that are: "
                f"{', '.join(WORKS)} (`precondattn bench` measures the others)"
            )
    cases = selection.cases()
    if not cases:
        raise ValueError(f"none of the requested cases is one of {', '.join(WORKS)}")
    for backend in selection.backends:
        _runs_on(backend, "")
    of_cases = [peer.name for case in cases for peer in _offered(case)]
    for name in selection.peers or ():
        if name in NEVER:
            raise ValueError(f"{name!r} is no peer here: add it to the libraries")
        if name not in of_cases:
            raise ValueError(f"{name} is no peer of {', '.join({c.mechanism for c in cases})}")


@lru_cache
def rows_of(
    selection: Selection, device: str | None = None, *, quick: bool = False
) -> tuple[BenchmarkRow, ...]:
    """The rows of a test, group by group: ours first, then the peers of the group, once each.

    Raises
    ------
    ValueError
        if none of the libraries has this device.
    """
    cases = selection.cases(quick=quick)
    missing = _without_device({case.library for case in cases}, device)
    if missing and all(case.library in missing for case in cases):
        raise ValueError("; ".join(missing.values()))
    ours: dict[Columns, BenchmarkRow] = {}
    beside: dict[Columns, BenchmarkRow] = {}
    for case in cases:
        mechanism = pa.parse(case.mechanism)
        for backend in selection.backends:
            if _runs_on(backend, case.library):
                named = None if backend == DEFAULT else backend
                columns = columns_of(case, case.library, named, device)
                lack = missing.get(case.library) or _not_installed(case.library)
                row = BenchmarkRow(columns, case, named, None, str(mechanism), lack)
                ours.setdefault(columns, row)
        for peer in _offered(case):
            library = peer.library or case.library
            columns = columns_of(case, library, peer.name, device)
            lack = lacks(peer, case, columns.device) or _without_device([library], device).get(
                library, ""
            )
            if lack and case.peers is None:
                continue
            computed = str(computed_by(peer, mechanism))
            named = next((b for b in selection.backends if b != DEFAULT), None)
            row = BenchmarkRow(columns, case, named, peer, computed, lack)
            beside.setdefault(columns, row)
    rows = [*ours.values(), *beside.values()]
    order = {group: i for i, group in enumerate(dict.fromkeys(row.columns.group for row in rows))}
    return tuple(sorted(rows, key=lambda row: order[row.columns.group]))


def _offered(case: BenchCase) -> list[TimedPeer]:
    """The peers of a case that are rows."""
    fitting = [peer for peer in peers_of(case) if peer.name not in NEVER]
    if case.peers is None:
        fitting = [peer for peer in fitting if peer.name not in OURS]
    return fitting


def _runs_on(backend: str, library: str) -> bool:
    """Whether a backend, or the first of several, declares a library; any if that is empty.

    Raises
    ------
    ValueError
        if there is no backend of this name.
    """
    if backend == DEFAULT:
        return True
    first, *_ = (discover().named(name) for name in backend.split(","))
    return not library or not first.libraries or library in first.libraries


def _not_installed(library: str) -> str:
    is_here = array_libraries.named(library).is_installed()
    return "" if is_here else f"{library} can not be used here"


def _without_device(names: Iterable[str], device: str | None) -> dict[str, str]:
    """The reasons why installed libraries have no such device, by library."""
    missing = {}
    for name in names:
        if device is None or _not_installed(name):
            continue
        try:
            array_libraries.require_device([name], device_on(name, device))
        except ValueError as error:
            missing[name] = str(error)
    return missing
