"""A step of LUCID by one token: from the cache's buffers to the launch of `decode.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.lucid import LucidStepKernels, leaves_of
from precondattn_pallas.arrays import where_valid
from precondattn_pallas.configurations import Configuration, configuration
from precondattn_pallas.lucid import decode as lucid_decode
from precondattn_pallas.precision import LOG2_E, Products, products
from precondattn_pallas.softmax.score_tiles import padded

PROGRAMS = 256
"""The least number of programs of `read_past`, if there are as many tiles: two for each
multiprocessor of a large GPU."""


class LucidStepPlan(NamedTuple):
    """Sizes and options of a step, which are known before it runs."""

    group: Piece
    tiles: Configuration
    products: Products


class LucidStep(LucidStepKernels):
    """The group `y1 = lucid_solve(k, v); out = softmax(q, k, v=y1)`."""

    def __init__(self, *, interpret: bool) -> None:
        self.interpret = interpret

    def step(
        self, group: Piece, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Updates]:
        q, v = x["q"], x["v"]
        widest = max(padded_width(q.shape[3]), padded_width(v.shape[3]))
        plan = LucidStepPlan(
            group,
            configuration("lucid_decode", widest, q.dtype.itemsize == 2),
            products(q.dtype, interpret=self.interpret),
        )
        out, y, rms = _step(plan, dict(past), dict(x), (frame.q_valid, frame.k_valid))
        return out, self.updates(group, x["k"], y, rms)


@partial(jax.jit, static_argnums=0)
def _step(plan: LucidStepPlan, past: Arrays, x: Arrays, masks: Array) -> tuple[Array, Array, Array]:
    """The output (b, 1, h, e), y (b, 1, n, e), and rms(k) (b, 1, n) or None."""
    solve, softmax = leaves_of(plan.group)
    slots = plan.group.program.calls[0].slot_keys()
    q, beta = x["q"], x.get("lucid_beta")
    b, _, h, d = q.shape
    n, e = x["v"].shape[2:]
    m, group = b * n, h // n
    q_valid, valid = masks
    capacity = past[slots["key"]].shape[1]
    valid = jnp.broadcast_to(valid, (b, capacity + 1))
    new, cached = valid[:, capacity:], valid[:, :capacity]
    # A new token with a masked key still attends to the other keys.
    is_token = jnp.ones((b, 1), bool) if q_valid is None else jnp.broadcast_to(q_valid, (b, 1))
    k, v = (where_valid(new, x[name]).astype(jnp.float32) for name in ("k", "v"))
    rms = None
    unit = k
    if solve.normalize == "keys":
        mean_square = jnp.mean(k * k, axis=3) + solve.eps
        rms = jnp.sqrt(jnp.where(mean_square > 0, mean_square, 1.0))
        unit = k / rms[..., None]

    scale, key_scale = softmax.scale_for(d) * LOG2_E, solve.scale_for(d) * LOG2_E
    queries = scale * where_valid(is_token, q).astype(jnp.float32).reshape(m, group, d)
    rows = jnp.concatenate([queries, key_scale * unit.reshape(m, 1, d)], axis=1)
    widths = padded_width(d), padded_width(e)
    rows = padded(rows, padded_width(group + 1), widths[0])
    tokens = -(-capacity // plan.tiles.columns) * plan.tiles.columns
    # A copy, unless the cache has whole tiles.
    buffers = {
        "keys": padded(past[slots["key"]], tokens, widths[0]),
        "solved": padded(past[slots["solved"]], tokens, widths[1]),
        "valid": padded(cached[..., None].astype(jnp.int32), tokens, 1)[..., 0],
    }
    if rms is not None:
        buffers["rms"] = padded(past[slots["rms"]], tokens, n)
    filled_slots = jnp.max(jnp.where(cached, jnp.arange(1, capacity + 1), 0), axis=1)
    partial_sums = lucid_decode.read(
        rows,
        buffers,
        filled_slots.astype(jnp.int32),
        plan.tiles,
        products=plan.products,
        group=group,
        shift=key_scale * d,
        splits=max(min(math.ceil(PROGRAMS / m), tokens // plan.tiles.columns), 1),
    )
    partial_sums = partial_sums._replace(totals=partial_sums.totals[..., :e])
    factor = jnp.ones((b, 1, n)) if beta is None else beta
    factor = where_valid(new, factor).astype(jnp.float32).reshape(m)
    counts = jnp.repeat(new[:, 0], n)
    out, y = lucid_decode.finished(
        partial_sums, queries, k.reshape(m, d), counts, v.reshape(m, e), factor, group
    )
    out = where_valid(is_token, out.reshape(b, 1, h, e)).astype(x["v"].dtype)
    return out, y.reshape(b, 1, n, e).astype(x["v"].dtype), rms
