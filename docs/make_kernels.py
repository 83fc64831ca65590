"""Write `kernel_table.md`: what the kernels of each backend compute, as the backends report it.

python docs/make_kernels.py

No GPU, no TPU and no CuPy are needed. Each kernel backend plans a call as if its device were
present, and `reference` computes what it declines. A cell whose kernels are in the ledger of the
backend (`ledger.json` in its package) is marked with the GPUs on which they ran.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from recorded import DOCS, with_measured

import precondattn as pa
from precondattn.algebra.piece import Piece
from precondattn.backend import Request
from precondattn.dispatch.described import explain_described
from precondattn.dispatch.discovery import discover
from precondattn.dispatch.explanation import Explanation
from precondattn.kernel_backend import KernelBackend
from precondattn.kernel_backend.code_hash import code_of
from precondattn.kernel_backend.kernel_table import entry_in
from precondattn.kernel_backend.ledger import LedgerEntry, entries, family_of

PAGE = DOCS / "kernel_table.md"


class Column(NamedTuple):
    """A backend on a device."""

    title: str
    backend: str
    library: str
    device: str


COLUMNS = (
    Column("Triton", "triton", "torch", "cuda"),
    Column("Pallas", "pallas", "jax", "cuda"),
    Column("Pallas TPU", "pallas", "jax", "tpu"),
    Column("CuPy", "cupy", "cupy", "cuda"),
)
VERBS = {"forward": "forward", "backward": "vjp", "decode": "extend"}
SIZES = {"forward": {"t": 128}, "backward": {"t": 128}, "decode": {"t": 1, "c": 4096}}
SOFTMAX, RECURRENCES, NOT_CAUSAL = "Softmax and its preconditioners", "Recurrences", "Not causal"
ROWS = {
    SOFTMAX: (
        "softmax",
        "softmax[window=64]",
        "softmax[causal=false]",
        "softmax[forget=scaled]",
        "laser",
        "lucid",
        "lucid(softmax[window=64])",
        "lucid(laser)",
        "lucid(path)",
        "lucid[rho=0.5](softmax[causal=false])",
        "path",
        "laser(path)",
        "deltaformer",
        "differential",
        "differential(laser)",
        "row_normalized",
        "qk_norm",
        "qk_norm(lucid)",
        "temperature",
        "per_dim_scale",
        "elu1(linear)",
        "hedgehog(linear)",
    ),
    RECURRENCES: (
        "linear",
        "retention",
        "ssd",
        "gla",
        "hgrn2",
        "rwkv6",
        "mlstm",
        "gsa",
        "delta",
        "gated_delta",
        "kda",
        "gdn2",
        "comba",
        "delta_product",
        "dplr",
        "atk",
        "atk(kda)",
        "stable_step",
        "mesa",
        "ccq(gla)",
        "ccq(gated_delta)",
    ),
    NOT_CAUSAL: ("cross_covariance", "nystrom", "windowed", "row_normalized(windowed)"),
}
"""Mechanisms and compositions, by the heading of their table; `rows` adds newer mechanisms."""

NEVER = "Nothing is marked **✓**: no kernel has run on its device yet."


def rows() -> dict[str, list[str]]:
    """`ROWS`, and every mechanism of the library that none of them names."""
    found = {heading: list(texts) for heading, texts in ROWS.items()}
    named = {name for texts in ROWS.values() for text in texts for name in re.findall(r"\w+", text)}
    for name, cls in sorted(pa.mechanisms().items()):
        if name in named or not cls.__module__.startswith("precondattn."):
            continue
        is_recurrent = cls().recurrence is not None
        causal = RECURRENCES if is_recurrent else SOFTMAX
        found[causal if cls().offers.causal else NOT_CAUSAL].append(name)
    return found


class Kernels(pa.Backend):
    """The kernels of a backend, which plan as if its device and packages were present."""

    only_by_name = True

    def __init__(self, backend: KernelBackend) -> None:
        self.name = f"kernels of {backend.name}"
        self.ask: Callable[[Piece, Request], str | None] = backend.refusal_of_kernels

    def prepare(self, piece: Piece, request: Request) -> pa.Runner | str:
        return self.ask(piece, request) or pa.Runner()  # They are only asked.


@contextmanager
def describing(column: Column) -> Iterator[KernelBackend]:
    """The backend of a column, which plans as if its device were present."""
    backend = _backend(column.backend)
    with backend.describing(column.device):
        yield backend


class KernelAnswer(NamedTuple):
    """The part of a call that kernels compute."""

    computed: tuple[Piece, ...]
    """The leaves and groups that they compute."""
    reasons: tuple[str, ...]
    """Why they decline the other leaves."""


@contextmanager
def asked() -> Iterator[None]:
    """A context in which the kernels of all backends are registered, by the names of `Kernels`."""
    names = dict.fromkeys(column.backend for column in COLUMNS)
    kernels = [Kernels(_backend(name)) for name in names]
    for each in kernels:
        pa.register_backend(each)
    try:
        yield
    finally:
        for each in kernels:
            pa.unregister_backend(each.name)


def _backend(name: str) -> KernelBackend:
    """An installed backend of kernels."""
    backend = discover().named(name)
    assert isinstance(backend, KernelBackend)
    return backend


def cell(mechanism: Piece, column: Column, work: str) -> KernelAnswer:
    """The kernels' answer for one call."""
    name = f"kernels of {column.backend}"
    if VERBS[work] == "extend" and not mechanism.offers.causal:
        return KernelAnswer((), ("it is not causal, so that it has no cache",))
    found = explain_described(
        mechanism,
        column.library,
        "float32",
        column.device,
        VERBS[work],
        SIZES[work],
        backend=(name, "reference"),
    )
    computed = tuple(c.piece for c in found.plan.calls if c.backend.name == name)
    return KernelAnswer(computed, tuple(_reasons(found, name)))


def _reasons(found: Explanation, name: str) -> Iterable[str]:
    """Why leaves that no kernel computes are declined, each by itself."""
    left = {call.out for call in found.plan.calls if call.backend.name != name}
    for considered in found.plan.considered:
        if considered.backend == name and len(considered.calls) == 1 and not considered.support.ok:
            call = found.program.calls[min(considered.calls)]
            if call.out in left:
                yield considered.support.reason.replace(" on a TPU", "")  # The title says so.


def ran_on(
    answer: KernelAnswer, column: Column, work: str, ledger: Iterable[LedgerEntry]
) -> list[str]:
    """The compute capabilities on which all kernels of a cell have run, with the code of today."""
    with describing(column) as backend:
        table = backend.table
    found = []
    for piece in answer.computed:
        entry = entry_in(table, piece)
        assert entry is not None
        known = family_of(piece, entry), VERBS[work], code_of(entry)
        found.append({e.capability for e in ledger if (e.family, e.verb, e.code) == known})
    return sorted(set.intersection(*found)) if found else []


def page(ledgers: Callable[[str], Iterable[LedgerEntry]] = entries) -> str:
    """The page, as Markdown; `ledgers` gives the ledger of a package."""
    numbers: dict[str, int] = {}
    titles = [f"{column.title}: {work}" for column in COLUMNS for work in VERBS]
    tables = []
    with asked():
        for heading, texts in rows().items():
            tables += [f"\n## {heading}\n", f"| | {' | '.join(titles)} |"]
            tables.append("|---" * (len(titles) + 1) + "|")
            for text in texts:
                cells = (
                    _shown(pa.parse(text), column, work, ledgers, numbers)
                    for column in COLUMNS
                    for work in VERBS
                )
                tables.append(f"| `{text}` | {' | '.join(cells)} |")
    notes = "\n".join(f"{number}. {reason}." for reason, number in numbers.items())
    never = "" if any("**" in line for line in tables) else NEVER
    return with_measured(PAGE, "\n".join([never, *tables]).strip(), notes)


def _shown(
    mechanism: Piece,
    column: Column,
    work: str,
    ledgers: Callable[[str], Iterable[LedgerEntry]],
    numbers: dict[str, int],
) -> str:
    """A cell of the table. Reasons that have no number yet get the next one."""
    answer = cell(mechanism, column, work)
    of = dict.fromkeys(str(numbers.setdefault(r, len(numbers) + 1)) for r in answer.reasons)
    text = ", ".join(of)
    if not answer.computed:
        return text
    ran = ran_on(answer, column, work, ledgers(f"precondattn_{column.backend}"))
    text = f"({text})" if of else "✓"
    return f"**{text}** {', '.join(ran)}" if ran else text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
