"""The requested cases: by name or by mechanism, with other sizes, dtypes and peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import precondattn as pa
from precondattn.execution.cache_checks import check_cacheable
from precondattn_conformance import libraries
from precondattn_conformance.bench.cases import (
    COMPARED,
    SIZES,
    WORKS,
    BenchCase,
    declared,
    layout,
)
from precondattn_conformance.inputs import CallLayout


def chosen(
    names: tuple[str, ...] = (),
    *,
    mechanisms: tuple[str, ...] = (),
    works: tuple[str, ...] = (),
    libraries_: tuple[str, ...] = (),
    sizes: tuple[str, ...] = (),
    dtype: str | None = None,
    peers: tuple[str, ...] | None = None,
    memory: bool = False,
    quick: bool = False,
) -> list[BenchCase]:
    """The requested cases.

    They are selected by name (`*` matches any text) or by mechanism. Where neither is given, they
    are the timed ones of `COMPARED`. The other arguments narrow or change the selection; where
    `peers` is None, each case has its own.

    Raises
    ------
    ValueError
        for a name that does not exist; of cases, with the nearest.
    """
    _check("work", works, WORKS)
    _check("array library", libraries_, tuple(cls.name for cls in libraries.ALL))
    _check("dtype", (dtype,) if dtype else (), libraries.WIDE + libraries.HALF)
    if mechanisms:
        if names:
            raise ValueError("select cases by name or by mechanism, not by both")
        cases = [
            BenchCase(f"{work}_{m}", str(pa.parse(m)), work, layout(), library)
            for m in mechanisms
            for work in works or ("forward", *(("memory",) if memory else ()))
            for library in libraries_ or ("torch",)
        ]
    else:
        named = _named(names, memory or "memory" in works)
        cases = [case for case in named if not works or case.work in works]
        cases = [case for case in cases if not libraries_ or case.library in libraries_]
    if not cases:
        raise ValueError("no case is left of those requested; `--list` names them all")
    if sizes:
        cases = [
            replace(case, layout=with_sizes(case.layout, text)) for case in cases for text in sizes
        ]
    if quick:
        cases = [
            replace(case, layout=_small(case.layout), calls=min(case.calls, 2)) for case in cases
        ]
    if dtype:
        cases = [replace(case, dtype=dtype) for case in cases]
    if peers is not None:
        cases = [replace(case, peers=peers) for case in cases]
    for case in cases:
        if case.work == "decode":
            check_cacheable(pa.parse(case.mechanism))
        if case.dtype not in libraries.named(case.library).dtypes:
            raise ValueError(f"{case.library} is not measured in {case.dtype} ({case.name})")
    return cases


def _check(what: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    for each in given:
        if each not in known:
            raise ValueError(f"unknown {what} {each!r}; known are {', '.join(known)}")


def _named(names: tuple[str, ...], memory: bool) -> list[BenchCase]:
    if not names:
        return [
            case
            for case in COMPARED
            if case.work != "memory" or (memory and not case.name.startswith("long_"))
        ]
    cases = declared()
    for name in names:
        if not any(fnmatchcase(case.name, name) for case in cases):
            near = get_close_matches(name, [case.name for case in cases], n=4, cutoff=0.5)
            nearest = f"the nearest are {', '.join(near)}; " if near else ""
            raise ValueError(
                f"unknown case {name!r}; {nearest}`precondattn bench --list` names all {len(cases)}"
            )
    return [case for case in cases if any(fnmatchcase(case.name, name) for name in names)]


def with_sizes(old: CallLayout, text: str) -> CallLayout:
    """The layout with the sizes of `"t=1024,h=4"` replaced."""
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        letter, _, size = (word.strip() for word in part.partition("="))
        if letter not in SIZES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"sizes are written as t=4096,h=8 with the letters {', '.join(SIZES)}; "
                f"found {part!r}"
            )
        sizes[letter] = int(size)
    if "h" in sizes and "n" not in sizes and old.h == old.n:
        sizes["n"] = sizes["h"]
    if "d" in sizes and "e" not in sizes and old.d == old.e:
        sizes["e"] = sizes["d"]
    if "t" in sizes:
        sizes["s"] = sizes["t"]
    new = old._replace(**sizes)
    if new.h % new.n:
        raise ValueError(f"h must be a multiple of n; found h={new.h}, n={new.n}")
    return new


def _small(old: CallLayout) -> CallLayout:
    """A layout with sizes that are small enough for a test."""
    n = 4 if old.n == old.h else 1
    return old._replace(t=48, s=48, h=4, n=n, d=8, e=8, m=4)
