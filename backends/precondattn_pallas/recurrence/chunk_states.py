"""The states between chunks, and their gradients: what has to go from chunk to chunk.

    U = Y − W S,                    S ← total ∘ S + (writing ∘ K)ᵀ U,
    dU = A + (writing ∘ K) dS,      dS ← total ∘ dS + (reading ∘ Q)ᵀ dO − Wᵀ dU,

with Y and W of `delta_rule.py`, where values are added U = V and W = 0; A is what the chunk's own
outputs make of U's gradient (`chunk_reads.py`). A program has a block of value channels of one
head, and goes over the chunks with its d × block of the state in registers. Everything else that
chunks have to do is done for all of them at once.

For T tokens of a head, forward 4 T d e FLOPs (additive 2), backward 6 (additive 4); memory traffic
is dominated by a state of d e numbers for every chunk, written once.
"""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl

from precondattn_pallas.launch import loop
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import Plan, Rows, Way, empty
from precondattn_pallas.recurrence.chunk_tiles import faded


def carry_states(x: Any, out: Any, *, products: Products, chunk: int, count: int) -> None:
    """The state in front of every chunk, the last one, and by the delta rule U."""

    def one(index: Any, state: Any) -> Any:
        here = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
        out["states"][index, :, :] = state
        u = x["y"][here, :]
        if "w" in x:
            u = u - products.dot(x["w"][here, :], state)
            out["u"][here, :] = u
        k = faded(x, "k", "writing", here, slice(None))
        return _kept(x, index, state) + products.dot(k, u, left=True)

    out["final"][...] = loop(0, count, one, x["start"][...])


def carry_gradients(x: Any, out: Any, *, products: Products, chunk: int, count: int) -> None:
    """The gradient of the state behind every chunk, that of the first, and dU."""

    def one(step: Any, d_state: Any) -> Any:
        index = count - 1 - step
        here = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
        out["d_states"][index, :, :] = d_state
        k = faded(x, "k", "writing", here, slice(None))
        d_u = x["local"][here, :] + products.dot(k, d_state)
        out["d_u"][here, :] = d_u
        d_state = _kept(x, index, d_state)
        for row in range(x["q"].shape[0]):
            q = faded(x, "q", "reading", row, here, slice(None))
            d_state = d_state + products.dot(q, x["d_o"][row, here, :], left=True)
        if "w" in x:
            d_state = d_state - products.dot(x["w"][here, :], d_u, left=True)
        return d_state

    out["d_start"][...] = loop(0, count, one, x["end"][...])


def _kept(x: Any, index: Any, state: Any) -> Any:
    return state * x["total"][index, :][:, None] if "total" in x else state


def _name(what: str, x: Rows) -> str:
    """Of the configuration: factors of channels take more registers."""
    return f"channel_{what}" if "g" in x and x["g"].ndim == 3 else f"chunk_{what}"


def states(plan: Plan, x: Rows, start: Any) -> tuple[Any, Any, Any]:
    """In front of every chunk (m, chunks, d, e), the last one (m, d, e), and U (m, T, e).

    From the one in front of the first; x has Y and W too, as y and w, by the delta rule.
    """
    m, d, e = start.shape
    count = x["k"].shape[1] // plan.chunk
    name = _name("states", x)
    way = Way(m, plan.block(name, e))
    y = x.get("y", x["v"])
    outputs = {"states": way.columns(empty(m, count, d, e)), "final": way.columns(empty(m, d, e))}
    if "w" in x:
        outputs["u"] = way.columns(empty(*y.shape))
    found = plan.launch(
        carry_states,
        name,
        way.shape(e),
        {
            **way.those(x, "k", "w", "writing", "total"),
            "y": way.columns(y),
            "start": way.columns(start),
        },
        outputs,
        chunk=plan.chunk,
        count=count,
    )
    return found["states"], found["final"], found.get("u", y)


def d_states(plan: Plan, x: Rows, d_o: Any, local: Any, end: Any) -> tuple[Any, Any, Any]:
    """Behind every chunk, in front of the first, and dU, from that behind the last."""
    m, d, e = end.shape
    count = x["k"].shape[1] // plan.chunk
    name = _name("gradients", x)
    way = Way(m, plan.block(name, e))
    found = plan.launch(
        carry_gradients,
        name,
        way.shape(e),
        {
            **way.those(x, "q", "k", "w", "reading", "writing", "total"),
            "d_o": way.columns(d_o),
            "local": way.columns(local),
            "end": way.columns(end),
        },
        {
            "d_states": way.columns(empty(m, count, d, e)),
            "d_start": way.columns(empty(m, d, e)),
            "d_u": way.columns(empty(*local.shape)),
        },
        chunk=plan.chunk,
        count=count,
    )
    return found["d_states"], found["d_start"], found["d_u"]
