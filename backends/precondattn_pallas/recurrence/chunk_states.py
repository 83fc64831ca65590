"""The states between chunks, and their gradients: the sequential part.

    U = Y − W S,                    S ← total ∘ S + (writing ∘ K)ᵀ U,
    dU = A + (writing ∘ K) dS,      dS ← total ∘ dS + (reading ∘ Q)ᵀ dO − Wᵀ dU,

with Y and W from `delta_rule.py`; for additive states, U = V and W = 0. A is the part of U's
gradient from the chunk's own outputs (`chunk_reads.py`). A program has a block of value channels of
one head, and iterates over the chunks with its d × block of the state in registers. Everything else
is computed for all chunks at once.

For T tokens of a head: forward 4 T d e FLOPs (additive 2), backward 6 (additive 4). Memory traffic
is dominated by one state of d e numbers per chunk, written once.
"""

from __future__ import annotations

from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.launch import References, loop
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import ChunkPlan, Rows, Sweep, empty
from precondattn_pallas.recurrence.chunk_tiles import decayed


def carry_states(
    x: References, out: References, *, products: Products, chunk: int, count: int
) -> None:
    """The state before every chunk, the last state, and with the delta rule U."""

    def one(index: Array, state: Array) -> Array:
        rows = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
        out["states"][index, :, :] = state
        u = x["y"][rows, :]
        if "w" in x:
            u = u - products.dot(x["w"][rows, :], state)
            out["u"][rows, :] = u
        k = decayed(x, "k", "writing", rows, slice(None))
        return _kept(x, index, state) + products.dot(k, u, left=True)

    out["final"][...] = loop(0, count, one, x["start"][...])


def carry_gradients(
    x: References, out: References, *, products: Products, chunk: int, count: int
) -> None:
    """The gradient of the state after every chunk, that of the first state, and dU."""

    def one(step: Array, d_state: Array) -> Array:
        index = count - 1 - step
        rows = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
        out["d_states"][index, :, :] = d_state
        k = decayed(x, "k", "writing", rows, slice(None))
        d_u = x["local"][rows, :] + products.dot(k, d_state)
        out["d_u"][rows, :] = d_u
        d_state = _kept(x, index, d_state)
        for row in range(x["q"].shape[0]):
            q = decayed(x, "q", "reading", row, rows, slice(None))
            d_state = d_state + products.dot(q, x["d_o"][row, rows, :], left=True)
        if "w" in x:
            d_state = d_state - products.dot(x["w"][rows, :], d_u, left=True)
        return d_state

    out["d_start"][...] = loop(0, count, one, x["end"][...])


def _kept(x: References, index: Array, state: Array) -> Array:
    return state * x["total"][index, :][:, None] if "total" in x else state


def _name(kernel: str, x: Rows) -> str:
    """The configuration's name; decays per channel have another, since they need more registers."""
    return f"channel_{kernel}" if "g" in x and x["g"].ndim == 3 else f"chunk_{kernel}"


def states(plan: ChunkPlan, x: Rows, start: Array) -> tuple[Array, Array, Array]:
    """States before every chunk (m, chunks, d, e), the last one (m, d, e), and U (m, T, e).

    `start` is the state before the first chunk. With the delta rule, x also has Y and W, as y and
    w.
    """
    m, d, e = start.shape
    count = x["k"].shape[1] // plan.chunk
    name = _name("states", x)
    sweep = Sweep(m, plan.block(name, e))
    y = x.get("y", x["v"])
    outputs = {
        "states": sweep.columns(empty(m, count, d, e)),
        "final": sweep.columns(empty(m, d, e)),
    }
    if "w" in x:
        outputs["u"] = sweep.columns(empty(*y.shape))
    result = plan.launch(
        carry_states,
        name,
        sweep.shape(e),
        {
            **sweep.named(x, "k", "w", "writing", "total"),
            "y": sweep.columns(y),
            "start": sweep.columns(start),
        },
        outputs,
        chunk=plan.chunk,
        count=count,
    )
    return result["states"], result["final"], result.get("u", y)


def d_states(
    plan: ChunkPlan, x: Rows, d_o: Array, local: Array, end: Array
) -> tuple[Array, Array, Array]:
    """Gradients after every chunk and before the first, and dU; `end` is that of the last state."""
    m, d, e = end.shape
    count = x["k"].shape[1] // plan.chunk
    name = _name("gradients", x)
    sweep = Sweep(m, plan.block(name, e))
    result = plan.launch(
        carry_gradients,
        name,
        sweep.shape(e),
        {
            **sweep.named(x, "q", "k", "w", "reading", "writing", "total"),
            "d_o": sweep.columns(d_o),
            "local": sweep.columns(local),
            "end": sweep.columns(end),
        },
        {
            "d_states": sweep.columns(empty(m, count, d, e)),
            "d_start": sweep.columns(empty(m, d, e)),
            "d_u": sweep.columns(empty(*local.shape)),
        },
        chunk=plan.chunk,
        count=count,
    )
    return result["d_states"], result["d_start"], result["d_u"]
