"""The table of docs/conformance.md: the share of the design's pairs that each level looks at.

    python docs/make_design_coverage.py

It is computed from the cases of each level, without running them. A run prints its own share, which
is smaller where the backend declines a case.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from precondattn_conformance.cases import cases
from precondattn_conformance.declared import expressions
from precondattn_conformance.design.coverage import pairs, total
from precondattn_conformance.design.levels import LEVELS
from precondattn_conformance.widest import is_narrow, runs

PAGE = Path(__file__).parent / "conformance.md"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->"
BACKENDS = (
    (("portable",), "numpy", None),
    (("torch",), "torch", None),
    (("jax",), "jax", None),
    (("triton", "torch"), "torch", "cuda"),
    (("pallas", "jax"), "jax", "cuda"),
    (("pallas", "jax"), "jax", "tpu"),
)
"""The backend under test and its helper, the array library, and the device."""


@cache
def narrow(backend: tuple[str, ...], library: str, device: str | None, expression: str) -> bool:
    return is_narrow(backend, expression, library, device)


def share(
    level: str, backend: tuple[str, ...], library: str, device: str | None, chosen: list[str]
) -> float:
    """The share of pairs in the cases of these expressions."""
    compared = cases(
        level,
        only_libraries=(library,),
        only_mechanisms=tuple(chosen),
        is_narrow=lambda expression, library: narrow(backend, library, device, expression),
        named="library",
    )
    ids = {case.id for case in compared}
    return total(pairs(level, chosen, (library,), ids, ())).share


def table() -> Iterator[str]:
    yield "| backend | arrays | expressions | " + " | ".join(f"`{x}`" for x in LEVELS) + " |"
    yield "|---" * (3 + len(LEVELS)) + "|"
    for backend, library, device in BACKENDS:
        computes = partial(runs, backend, library=library, dtype="float32", device=device)
        chosen = [text for text in expressions() if computes(text)]
        shares = [share(level, backend, library, device, chosen) for level in LEVELS]
        where = f"{library}, {device}" if device else library
        cells = [f"`{backend[0]}`", where, str(len(chosen)), *(f"{100 * x:.0f} %" for x in shares)]
        yield "| " + " | ".join(cells) + " |"


def page(text: str) -> str:
    """The page with the table."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{chr(10).join(table())}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
