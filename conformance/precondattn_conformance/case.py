"""Cases: what is checked, on which library, dtype and data. Ids are stable and replay a case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import precondattn as pa
from precondattn.call import keeps_tokens
from precondattn_conformance import libraries
from precondattn_conformance.declared import (
    derived,
    expressions,
    is_bounded,
    is_constant_in_one_token,
)
from precondattn_conformance.inputs import REAL, REAL_GROUPED, Layout

CHECKS = ("outputs", "gradients", "caching", "states")
LEVELS = ("smoke", "full")

PLAIN = Layout("plain")
RAGGED = Layout("ragged", mask="lengths", broadcast=True)
PACKED = Layout("packed", mask="segment_ids")
MASKED = Layout("masked", mask="key_mask", broadcast=True)
REAL_SHORT = REAL_GROUPED._replace(name="real_short", t=64, s=64)

SMOKE = (
    (PLAIN, "clustered"),
    (RAGGED, "duplicate"),
    (PACKED, "zero"),
    (REAL_SHORT, "real"),
)
FULL = (
    *SMOKE,
    (PLAIN, "random"),
    (PLAIN, "duplicate"),
    (PLAIN, "zero"),
    (MASKED, "clustered"),
    (Layout("single_token", t=1, s=1), "random"),
    (Layout("fewer_queries", t=3, s=9), "clustered"),
    (Layout("one_kv_head", h=8, n=1), "clustered"),
    (Layout("own_kv_heads", h=3, n=3, values_per_head=1), "clustered"),
    (Layout("odd_width", d=5, e=3), "clustered"),
    (Layout("block_less_one", b=1, t=63, s=63, h=2, n=1, d=16, e=8), "clustered"),
    (Layout("block_and_one", b=1, t=65, s=65, h=2, n=1, d=68, e=8), "clustered"),
    (REAL._replace(name="real_128", t=128, s=128), "real"),
)


@dataclass(frozen=True)
class Case:
    """One check of one mechanism on one kind of data."""

    check: str
    mechanism: str
    library: str
    dtype: str
    layout: Layout
    kind: str

    @property
    def id(self) -> str:
        parts = (self.check, self.library, self.dtype, self.layout.name, self.kind, self.mechanism)
        return "-".join(parts)


def cases(
    level: str = "smoke",
    *,
    only_libraries: tuple[str, ...] = (),
    only_mechanisms: tuple[str, ...] = (),
    only_checks: tuple[str, ...] = (),
    only_dtypes: tuple[str, ...] = (),
) -> Iterator[Case]:
    """The cases of a level, on every installed library unless told otherwise.

    A mechanism that was asked for need not be declared; any expression will do.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; found {level!r}")
    for wanted, known, what in (
        (only_checks, CHECKS, "check"),
        (only_libraries, tuple(libraries.installed()), "installed array library"),
        (only_dtypes, libraries.WIDE + libraries.HALF, "dtype"),
    ):
        for each in wanted:
            if each not in known:
                raise ValueError(f"{each!r} is no {what}; there are {', '.join(known)}")
    names = tuple(str(pa.parse(text)) for text in only_mechanisms) or tuple(expressions())
    for library in only_libraries or libraries.installed():
        for dtype in libraries.named(library).dtypes:
            if only_dtypes and dtype not in only_dtypes:
                continue
            for name, check in product(names, only_checks or CHECKS):
                for layout, kind in _data(level, check, library, dtype, name in derived()):
                    case = Case(check, name, library, dtype, layout, kind)
                    if makes_sense(case):
                        yield case


def _data(
    level: str, check: str, library: str, dtype: str, is_derived: bool
) -> tuple[tuple[Layout, str], ...]:
    """Layouts and kinds of keys.

    Smoke tries the masks in float64, where nothing blurs them. Of a composition that is nothing
    but steps it tries the wiring: every check once, outputs in every dtype. On JAX, which compiles
    every operation for every shape and dtype, it keeps to what is JAX's own: outputs under every
    mask, gradients and caching once, and of compositions and other dtypes outputs alone. Full tries
    everything.
    """
    if level == "full":
        return FULL
    only_outputs = library == "jax" and (is_derived or dtype != "float64")
    if only_outputs and check != "outputs":
        return ()
    if is_derived:
        if dtype != "float64":
            return SMOKE[:1] if check == "outputs" else ()
        return {"outputs": SMOKE[2:3], "gradients": SMOKE[:1]}.get(check, SMOKE[1:2])
    if library == "jax" and dtype == "float64":
        return {"outputs": SMOKE[:3], "gradients": SMOKE[:1]}.get(check, SMOKE[1:2])
    if dtype == "float64":
        return SMOKE
    if dtype == "float32" and check == "outputs" and library != "jax":
        return SMOKE[0], SMOKE[3]
    return SMOKE[:1]


def makes_sense(case: Case) -> bool:
    """Whether a mechanism has an answer for this data that could be compared."""
    mechanism = pa.parse(case.mechanism)
    if not is_bounded(mechanism) and case.kind in ("duplicate", "real"):
        return False
    if case.check == "gradients" and case.layout.t == 1 and is_constant_in_one_token(mechanism):
        return False  # What is 0 has no size to compare with.
    if case.check == "states" and (keeps_tokens(mechanism) or not mechanism.program.slots):
        return False
    if case.check in ("caching", "states"):
        is_one_sequence = case.layout.mask != "segment_ids" and case.layout.t == case.layout.s
        return mechanism.offers.causal and is_one_sequence
    return True
