"""The requested cases: by name or by mechanism, with other sizes, dtypes and peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import precondattn as pa
from precondattn.execution.cache_checks import check_cacheable
from precondattn.given import Arguments
from precondattn_conformance import libraries as array_libraries
from precondattn_conformance.bench.cases import (
    COMPARED,
    SIZES,
    WORKS,
    BenchCase,
    declared,
    layout,
)
from precondattn_conformance.inputs import CallLayout


@dataclass(frozen=True)
class Selection:
    """What is requested: cases by name (`*` matches any text), or by mechanism.

    Where neither is named, they are the timed ones of `COMPARED`. The other fields narrow or change
    the selection; where `peers` is None, each case has its own.
    """

    names: tuple[str, ...] = ()
    mechanisms: tuple[str, ...] = ()
    works: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    dtype: str | None = None
    peers: tuple[str, ...] | None = None
    backends: tuple[str, ...] = ()
    """Backends, each for a run of its own; none is the default choice."""
    device: str | None = None
    memory: bool = False
    quick: bool = False

    def cases(self) -> list[BenchCase]:
        """The requested cases. An unknown name is a `ValueError`; of cases, with the nearest."""
        _check("work", self.works, WORKS)
        _check("array library", self.libraries, tuple(cls.name for cls in array_libraries.ALL))
        dtypes = array_libraries.WIDE + array_libraries.HALF
        _check("dtype", (self.dtype,) if self.dtype else (), dtypes)
        if self.names and self.mechanisms:
            raise ValueError("select cases by name or by mechanism, not by both")
        cases = self._of_mechanisms() if self.mechanisms else self._named()
        if not cases:
            raise ValueError("no case is left of those requested; `--list` names them all")
        changed: Arguments = {"dtype": self.dtype, "peers": self.peers, "device": self.device}
        changed = {name: value for name, value in changed.items() if value is not None}
        cases = [
            replace(self._with_sizes(case, sizes), backend=backend, **changed)
            for case in cases
            for sizes in self.sizes or ("",)
            for backend in self.backends or (None,)
        ]
        for case in cases:
            if case.work == "decode":
                check_cacheable(pa.parse(case.mechanism))
            if case.dtype not in array_libraries.named(case.library).dtypes:
                raise ValueError(f"{case.library} is not measured in {case.dtype} ({case.name})")
        return cases

    def _with_sizes(self, case: BenchCase, sizes: str) -> BenchCase:
        case = replace(case, layout=with_sizes(case.layout, sizes)) if sizes else case
        if not self.quick:
            return case
        n = 4 if case.layout.n == case.layout.h else 1
        layout = case.layout._replace(t=48, s=48, h=4, n=n, d=8, e=8, m=4)
        return replace(case, layout=layout, calls=min(case.calls, 2))

    def _of_mechanisms(self) -> list[BenchCase]:
        return [
            BenchCase(f"{work}_{m}", str(pa.parse(m)), work, layout(), library)
            for m in self.mechanisms
            for work in self.works or ("forward", *(("memory",) if self.memory else ()))
            for library in self.libraries or ("torch",)
        ]

    def _named(self) -> list[BenchCase]:
        by_name = {case.name: case for case in declared()}
        for name in self.names:
            if not any(fnmatchcase(case, name) for case in by_name):
                near = get_close_matches(name, by_name, n=4, cutoff=0.5)
                nearest = f"the nearest are {', '.join(near)}; " if near else ""
                raise ValueError(
                    f"unknown case {name!r}; {nearest}`precondattn bench --list` names all "
                    f"{len(by_name)}"
                )
        return [
            case
            for case in (by_name.values() if self.names else COMPARED)
            if (any(fnmatchcase(case.name, n) for n in self.names) or self._is_usual(case))
            and (not self.works or case.work in self.works)
            and (not self.libraries or case.library in self.libraries)
        ]

    def _is_usual(self, case: BenchCase) -> bool:
        """Whether a run that names no cases has this one."""
        memory = self.memory or "memory" in self.works
        is_short = not case.name.startswith("long_")
        return not self.names and (case.work != "memory" or (memory and is_short))


def _check(what: str, names: Iterable[str], existing: tuple[str, ...]) -> None:
    for name in names:
        if name not in existing:
            raise ValueError(f"unknown {what} {name!r}; known are {', '.join(existing)}")


def with_sizes(old: CallLayout, text: str) -> CallLayout:
    """The layout with the sizes of `"t=1024,h=4"` replaced."""
    sizes: Arguments = {}
    for part in text.split(","):
        letter, _, size = (word.strip() for word in part.partition("="))
        if letter not in SIZES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"sizes are written as t=4096,h=8 with the letters {', '.join(SIZES)}; "
                f"found {part!r}"
            )
        sizes[letter] = int(size)
    for letter, follower in (("h", "n"), ("d", "e"), ("t", "s")):
        if letter in sizes and getattr(old, letter) == getattr(old, follower):
            sizes.setdefault(follower, sizes[letter])
    new = old._replace(**sizes)
    if new.h % new.n:
        raise ValueError(f"h must be a multiple of n; found h={new.h}, n={new.n}")
    return new
