"""A step of LUCID for few tokens: solve and attention read each cached key and each y once.

    [S; Φ] = [s q; s k̂] Kᵀ            one product with the cached keys,
    [a; r] = [e^{S − m}; Φ] Y          one product with the cached y,
    y_new = (I + β stril(Φ_new))⁻¹ β (v − r),    o = (a + e^{S_new − m} y_new) / Σ e^{S − m}.

Computed one after the other, the two leaves would read both buffers twice, and reading dominates
the cost of a step.
"""

from __future__ import annotations

from typing import cast

from precondattn.algebra.group import Group
from precondattn.arrays import Array, Arrays, namespace
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import finite_or_zero, row_sum, transpose
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.rms_norm import rms
from precondattn.spec.softmax import Softmax
from precondattn_portable.algorithm import Algorithm, AnyAlgorithm
from precondattn_portable.arithmetic import Arithmetic, changed_at
from precondattn_portable.extension import filled, past_columns, past_heads
from precondattn_portable.layout import (
    ALL_HEADS,
    Tile,
    block_size,
    queries_by_key_head,
    time_first,
    tokens_at,
)
from precondattn_portable.lucid_solve import LucidSolveBlocks, PastSystem, shift_and_factor
from precondattn_portable.masks import Mask


class LucidStep(Algorithm[Group]):
    """A step of `y1 = lucid_solve(k, v); out = softmax(q, k, v=y1)`."""

    name = "solve and attention together"

    def __init__(self, ops: Arithmetic, leaf: Group, attention: AnyAlgorithm) -> None:
        super().__init__(ops, leaf)
        self.leaves = cast("tuple[LucidSolve, Softmax]", leaf.program.leaves)
        self.keys = leaf.program.slot_keys
        self.solve, self.attention = LucidSolveBlocks(ops, self.leaves[0]), attention

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        ops, (solve, softmax), keys = self.ops, self.leaves, self.keys
        t, n = x["k"].shape[1:3]
        solve_past = {slot: past[key] for slot, key in keys[0].items()}
        is_windowed = softmax.window is not None or solve.window is not None
        if t == 1 and frame.held is not None and not is_windowed:
            return self._one_token(solve_past, x, frame.held)
        is_many = t * x["q"].shape[2] // n > block_size(ops.sizes, t)
        if is_many or frame.is_traced:
            softmax_past = {slot: past[key] for slot, key in keys[1].items()}
            y, updates = self.solve.step(solve_past, x, frame)
            out, more = self.attention.step(softmax_past, {**x, "v": y}, frame)
            solve_updates = {keys[0][slot]: update for slot, update in updates.items()}
            return out, {keys[1][slot]: update for slot, update in more.items()} | solve_updates

        known = filled(frame, solve_past["key"].shape[1])
        xp, count = namespace(x["q"]), known.count
        system = PastSystem(ops, solve, solve_past, x, known)
        mask = Mask(known.frame, count + t, known.offset, window=softmax.window)
        b, _, h, d = x["q"].shape
        split = h // n * t
        rows = xp.reshape(ops.heads_first(x["q"]), (b, n, split, d)) * softmax.scale_for(d)

        def masked(scores: Array, low: int, high: int) -> Array:
            # A copy, because `scores` may be a view of `weights`, to which the result is assigned.
            return mask.apply(ops, xp.asarray(scores, copy=True), Tile(0, t, low, high))

        new_scores = ops.product(rows, transpose(ops.heads_first(x["k"])))
        if t > 1 or not mask.is_plain:
            new_scores = masked(new_scores, count, count + t)
        largest = xp.max(new_scores, axis=-1, keepdims=True)
        weights = ops.product(xp.concat([rows, system.queries], axis=2), transpose(system.keys))
        reading, solving = tokens_at(0, split), tokens_at(split, split + t)
        if count:
            cached = weights[reading]
            if not mask.is_plain:
                weights[reading] = cached = masked(cached, 0, count)
            largest = xp.maximum(largest, xp.max(cached, axis=-1, keepdims=True))
            cached = weights[solving]
            # A copy, because `masked` may return a view.
            scores = cached if system.mask.is_plain else xp.asarray(cached, copy=True)
            logs = system.logs(scores, ALL_HEADS, Tile(0, t, 0, count))
            if logs is not cached:
                weights[solving] = logs
        # Without masks, every query has a visible key, and `largest` is finite.
        shift = largest if mask.is_plain else finite_or_zero(largest)
        changed_at(ops.subtract, weights, reading, shift)
        weights = ops.exp(weights)
        read = ops.product(weights, system.solved)

        right = ops.heads_first(x["v"]) - read[solving] * system.factor
        y = self.solve.among_new(x, right, known, frame)
        new_weights = ops.exp(ops.subtract(new_scores, shift))
        total = row_sum(weights[reading]) + row_sum(new_weights)
        if not mask.is_plain:
            total = xp.where(total > 0, total, 1.0)
        out = (read[reading] + ops.product(new_weights, ops.heads_first(y))) / total
        updates = self._updates(x["k"], y, system.new_rms)
        return time_first(xp.reshape(out, (b, h, t, out.shape[3]))), updates

    def _one_token(self, past: Arrays, x: Arrays, held: int) -> tuple[Array, Updates]:
        """One token after equally many cached tokens in every sequence, none of them masked."""
        ops, (solve, softmax) = self.ops, self.leaves
        xp, (b, _, n, d), h = namespace(x["k"]), x["k"].shape, x["q"].shape[2]
        reading, solving = tokens_at(0, h // n), tokens_at(h // n, h // n + 1)
        k, v = xp.reshape(x["k"], (b, n, 1, d)), xp.reshape(x["v"], (b, n, 1, -1))
        keys, solved = past_columns(past["key"], held), past_heads(past["solved"], held)
        q, scale = queries_by_key_head(x["q"], n) * softmax.scale_for(d), solve.scale_for(d)
        r = rms(k, solve.eps) if solve.normalize == "keys" else None
        unit = k * scale if r is None else k * (scale / r)

        weights = ops.product(xp.concat([q, unit], axis=2), keys)
        own = row_sum(q * k)
        largest = xp.maximum(own, xp.max(weights[reading], axis=-1, keepdims=True)) if held else own
        changed_at(ops.subtract, weights, reading, largest)
        if r is not None:
            changed_at(ops.divide, weights, solving, past_heads(past["rms"], held)[:, :, None, :])
        shift, factor = shift_and_factor(scale * d)
        if shift:
            changed_at(ops.subtract, weights, solving, shift)
        weights = ops.exp(weights)

        read = ops.product(weights, solved)
        y = v - read[solving] * factor
        if solve.beta:
            y = xp.reshape(x["lucid_beta"], (b, n, 1, 1)) * y
        own = ops.exp(own - largest)
        total = row_sum(weights[reading]) + own
        # The quotient is contiguous, which the part of `read` is not.
        out = ops.add_multiple(read[reading], own, y) / total
        y, r = xp.reshape(y, (b, 1, n, -1)), None if r is None else xp.reshape(r, (b, 1, n, 1))
        return xp.reshape(out, (b, 1, h, -1)), self._updates(x["k"], y, r)

    def _updates(self, k: Array, y: Array, r: Array | None) -> Updates:
        keys = self.keys[0]
        updates: Updates = {keys["key"]: Append(k), keys["solved"]: Append(y)}
        return updates if r is None else updates | {keys["rms"]: Append(r[..., 0])}
