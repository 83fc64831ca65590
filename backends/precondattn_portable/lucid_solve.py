"""LUCID's triangular system, solved block by block without storing its matrix.

    E y = diag(β) v,    E = diag(δ) + diag(β) stril(Φ),    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − shift_i}

where δ = 1 in the normalised forms, and Φ's diagonal otherwise. With β' = β / δ and block rows I,

    y_I = (I + β'_I stril(Φ_II))⁻¹ β'_I (v_I − Σ_{J<I} Φ_IJ y_J).

The diagonal blocks are inverted at once (`triangular_inverse.py`). The sum is a row block of Φ
times the known part of y. Row blocks are two blocks high where that speeds up the products: the
second block then also needs the first block's y. Backward, from the last block to the first, with
R = dy,

    X_J = δ_J⁻¹ (I + β'_J stril(Φ_JJ))⁻ᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J    (I < J),
    dS_J = −(dv_J yᵀ) ∘ Φ_J,    dβ_J = X_J · (v_J − stril(Φ)_J y),

and dS is propagated through the scores and the norm of the keys while Φ_J is available.

A step is the same with the cached keys, y and norms as preceding tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import precondattn as pa
from precondattn.arrays import (
    Array,
    Arrays,
    Residuals,
    arange_like,
    namespace,
    placement,
    zero_where_not,
)
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum, transpose
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms, rms_norm_vjp
from precondattn.spec.transported import Transported
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.extension import (
    FilledPart,
    filled,
    new_tokens,
    past_heads,
    step_as_defined,
)
from precondattn_portable.in_place import product_at
from precondattn_portable.layout import (
    ROW_BLOCK_ENTRIES,
    Part,
    block_size,
    blocks,
    budget,
    chunk_size,
    head_groups,
    padded,
    time_first,
    tokens_at,
)
from precondattn_portable.lucid_one_block import is_one_block, solve_one_block
from precondattn_portable.masks import Mask
from precondattn_portable.scores import DotScores, Scores
from precondattn_portable.transported import TransportedScores
from precondattn_portable.triangular_inverse import unit_lower_inverse

ENTRIES = 2**21
"""Entries of the row blocks that are processed together, few as their passes are: 8 MiB in
float32, of which caches hold more."""

FACTORED = 32.0
"""The largest shift applied as a factor of products instead of a subtraction from every score.

Scores of normalised keys are at most the shift, and e³² is far from overflow in float32.
"""


class LucidView(NamedTuple):
    """A call with heads before time, padded to whole blocks."""

    k: Array
    """The keys as passed (b, n, s, d)"""
    unit: Array
    """k̂: the keys divided by their norm"""
    v: Array
    beta: Array | None
    """β (b, n, s, 1), 0 at padding; None where it is 1"""
    w: Array | None
    path_beta: Array | None

    def group(self, part: Part) -> LucidView:
        return LucidView(*(a if a is None else a[part] for a in self))


class LucidMatrix:
    """The matrix of a group of heads, one row block at a time."""

    def __init__(
        self,
        ops: Arithmetic,
        leaf: pa.LucidSolve,
        view: LucidView,
        mask: Mask,
        size: int,
        height: int,
        workspace: Scratch,
        *,
        gradient: bool = False,
    ) -> None:
        self.ops, self.leaf, self.view, self.mask, self.size = ops, leaf, view, mask, size
        self.height, self.workspace = height, workspace
        """The rows of a row block, and where it is put"""
        b, n, s, d = view.k.shape
        xp = namespace(view.k)
        self.scale = leaf.scale_for(d)
        self.chunks = s // size
        self.scores: Scores
        queries = xp.reshape(view.unit * self.scale, (b, n, 1, s, d))
        if isinstance(leaf.metric, Transported):
            self.scores = TransportedScores(
                ops, queries, view.unit, view.w, view.path_beta, size, workspace, gradient=gradient
            )
        else:
            self.scores = DotScores(ops, queries, view.unit, gradient=gradient)
        self.shift: Array | float = self.scale * d
        self.factor = math.exp(-self.shift) if self.shift <= FACTORED else 1.0
        self.diagonal: Array | None = None
        self.at_maximum: Array | None = None
        within = self._within()  # Transported scores provide it before the first row block.
        if not leaf.has_unit_diagonal:
            diagonal = row_sum(within * xp.eye(size, dtype=within.dtype, **placement(within)))
            diagonal = xp.reshape(diagonal, (b, n, s, 1))
            self.shift, self.factor = 0.0, 1.0
            if leaf.normalize == "rows":
                self.shift, self.at_maximum = self._row_maxima(diagonal)
            diagonal = diagonal - self.shift
            if view.beta is not None:  # Without an input β it is 1 or, at padding, 0.
                diagonal = xp.where(view.beta > 0, diagonal, 0.0)
            self.diagonal = xp.exp(diagonal)
        if leaf.normalize == "rows":
            within = within - xp.reshape(self.shift, (b, n, self.chunks, size, 1))
        else:
            within = ops.add(within, -self.shift)
        # stril(Φ) of every diagonal block (b, n, chunks, size, size)
        below = self._masked_within(ops.exp(within))
        del within  # As large as the inverses
        self.beta = self._beta()
        if self.beta is not None:
            below = below * xp.reshape(self.beta, (b, n, self.chunks, size, 1))
        self.inverse = unit_lower_inverse(ops, below)

    def _beta(self) -> Array | None:
        """β' (b, n, s, 1); None where it is 1."""
        beta = self.view.beta
        if self.diagonal is None:
            return beta
        return 1.0 / self.diagonal if beta is None else beta / self.diagonal

    def times_beta(self, x: Array, i0: int, i1: int) -> Array:
        """β' x, of some rows."""
        beta = self._beta()
        return x if beta is None else beta[:, :, i0:i1, :] * x

    def _within(self) -> Array:
        """The scores of every diagonal block."""
        if isinstance(self.scores, TransportedScores):
            return self.scores.within()
        xp = namespace(self.view.k)
        b, n, _, d = self.view.k.shape
        keys = xp.reshape(self.view.unit, (b, n, self.chunks, self.size, d))
        return self.ops.product(keys * self.scale, transpose(keys))

    def _masked_within(self, within: Array) -> Array:
        """0 on and above the diagonal, and at masked pairs."""
        xp = namespace(within)
        if self.mask.window is None and self.mask.frame.k_segment is None:
            return self.ops.lower(within, -1)
        token = arange_like(self.size, within)
        distance = token[:, None] - token[None, :]
        visible = distance > 0
        if self.mask.window is not None:
            visible = visible & (distance < self.mask.window)
        segment = self.mask.frame.k_segment
        if segment is not None:
            b = segment.shape[0]
            segment = xp.reshape(segment, (b, 1, self.chunks, self.size))
            visible = visible & (segment[..., :, None] == segment[..., None, :])
        return self.ops.keep(within, xp.broadcast_to(visible, within.shape), 0.0)

    def _row_maxima(self, diagonal: Array) -> tuple[Array, Array]:
        """m_i = max_{j≤i} of the scores (b, n, s, 1), and the first j that attains it."""
        if isinstance(self.scores, TransportedScores):
            scores: Scores = TransportedScores(
                self.ops,
                self.scores.q,
                self.view.unit,
                self.view.w,
                self.view.path_beta,
                self.size,
                self.ops.scratch(0, self.scores.q),
            )
        else:
            scores = self.scores
        xp = namespace(diagonal)
        maxima, positions = [], []
        for a in range(self.chunks):
            i0, i1 = a * self.size, (a + 1) * self.size
            low, high = self.mask.columns(i0, i1)
            high = max(high, low)
            best, position = (
                diagonal[:, :, i0:i1, :],
                arange_like(self.size, diagonal)[:, None] + i0,
            )
            position = xp.broadcast_to(position, best.shape)
            if low < high:
                row_block = scores.row_block(i0, i1, low, high, self.workspace)
                row_block = self._apply_mask(row_block, i0, i1, low, high, -math.inf)
                row_max = xp.max(row_block, axis=-1, keepdims=True)
                first = xp.astype(xp.argmax(row_block, axis=-1)[..., None], position.dtype) + low
                is_past = row_max >= best
                best, position = (
                    xp.where(is_past, row_max, best),
                    xp.where(is_past, first, position),
                )
            maxima.append(best)
            positions.append(position)
        return xp.concat(maxima, axis=2), xp.concat(positions, axis=2)

    def _apply_mask(
        self, row_block: Array, i0: int, i1: int, low: int, high: int, otherwise: float
    ) -> Array:
        xp = namespace(row_block)
        b, n, rows, columns = row_block.shape
        pairs = xp.reshape(row_block, (b, n, 1, rows, columns))
        pairs = self.mask.apply(self.ops, pairs, i0, i1, low, high, otherwise)
        return xp.reshape(pairs, row_block.shape)

    def rows(self, *, reverse: bool = False) -> Iterator[tuple[int, int, int]]:
        """Rows of each row block and their first visible key: i0, i1, low."""
        row_blocks = list(blocks(self.chunks * self.size, self.height))
        for i0, i1 in reversed(row_blocks) if reverse else row_blocks:
            yield i0, i1, min(self.mask.columns(i0, i1)[0], i0)

    def blocks(self, i0: int, i1: int) -> list[tuple[int, int, int]]:
        """The blocks of those rows: a, j0, j1."""
        return [(j0 // self.size, j0, j0 + self.size) for j0 in range(i0, i1, self.size)]

    def weights(self, i0: int, i1: int, low: int, high: int) -> Array:
        """Φ / `factor` (b, n, i1 − i0, high − low), 0 at masked pairs."""
        row_block = self.scores.row_block(i0, i1, low, high, self.workspace)
        if not isinstance(self.shift, float):
            row_block = self.ops.add(row_block, -self.shift[:, :, i0:i1, :])
        elif self.shift and self.factor == 1.0:
            row_block = self.ops.add(row_block, -self.shift)
        return self._apply_mask(self.ops.exp(row_block), i0, i1, low, high, 0.0)


class PastSystem:
    """Φ of new tokens and cached tokens; the cache stores raw keys and their norms."""

    def __init__(
        self,
        ops: Arithmetic,
        leaf: pa.LucidSolve,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        known: FilledPart,
    ) -> None:
        self.ops, count, xp = ops, known.count, namespace(x["k"])
        d = x["k"].shape[3]
        scale = leaf.scale_for(d)
        self.shift = scale * d
        # As in `LucidMatrix`: a factor of the products, where its reciprocal is not large.
        self.factor = 1.0
        if self.shift <= FACTORED:
            self.shift, self.factor = 0.0, math.exp(-self.shift)
        self.new_rms = rms(x["k"], leaf.eps) if leaf.normalize == "keys" else None
        k = x["k"] if self.new_rms is None else x["k"] / self.new_rms
        self.queries = ops.heads_first(k * scale)
        self.keys = past_heads(past["key"], count)
        self.solved = past_heads(past["solved"], count)
        self.rms: Array | None = None
        if leaf.normalize == "keys":
            r = past_heads(past["rms"], count)[:, :, None, :]
            # Empty slots, which are masked, hold 0. A norm is positive (`rms`).
            self.rms = r if known.offset is not None else xp.where(r > 0, r, 1.0)
        self.mask = Mask(known.frame, count, known.offset, window=leaf.window, strict=True)

    def weights(self, part: Part, i0: int, i1: int) -> Array:
        """Φ / `factor` (b, n, i1 − i0, count) of some heads and new tokens."""
        scores = self.ops.product(self.queries[part][:, :, i0:i1, :], transpose(self.keys[part]))
        return self.ops.exp(self.logs(scores, part, i0, i1))

    def logs(self, scores: Array, part: Part, i0: int, i1: int) -> Array:
        """log Φ − log `factor`, from scores with the keys as stored in the cache.

        In `scores` where the library can.
        """
        if self.rms is not None:
            scores = self.ops.divide(scores, self.rms[part])
        if self.shift:
            scores = self.ops.subtract(scores, self.shift)
        if self.mask.is_plain:
            return scores
        xp, count = namespace(scores), scores.shape[-1]
        pairs = xp.reshape(scores, (*scores.shape[:2], 1, i1 - i0, count))
        pairs = self.mask.of_sequences(part[0]).apply(self.ops, pairs, i0, i1, 0, count)
        return xp.reshape(pairs, scores.shape)


class LucidSolveBlocks(Algorithm[pa.LucidSolve]):
    """Algorithm of `LucidSolve`."""

    name = "substitution in blocks"

    def _view(self, x: Arrays, frame: Frame, size: int) -> LucidView:
        leaf = self.leaf
        missing = -x["k"].shape[1] % size
        names = ("k", "v", *leaf.metric.inputs, *(("lucid_beta",) if leaf.beta else ()))
        inputs = {name: padded(self.ops.heads_first(x[name]), 0, missing) for name in names}
        k = inputs["k"]
        xp = namespace(k)
        unit = k / rms(k, leaf.eps) if leaf.normalize == "keys" else k
        beta = inputs["lucid_beta"][..., None] if leaf.beta else None
        if missing or frame.k_valid is not None:
            valid = arange_like(k.shape[2], k)[None, :] < x["k"].shape[1]
            if frame.k_valid is not None:
                valid = valid & padded(frame.k_valid, 0, missing, axis=1)
            one = xp.ones_like(k[..., :1]) if beta is None else beta
            beta = zero_where_not(valid[:, None, :, None], one)
        return LucidView(k, unit, inputs["v"], beta, inputs.get("w"), inputs.get("beta"))

    def _size(self, s: int) -> int:
        """Tokens of a block."""
        return chunk_size(s) if isinstance(self.leaf.metric, Transported) else block_size(s)

    def _systems(
        self, view: LucidView, frame: Frame, *, gradient: bool = False
    ) -> Iterator[tuple[Part, LucidMatrix]]:
        leaf = self.leaf
        b, n, s, _ = view.k.shape
        size = self._size(s)
        frame = _padded_frame(frame, s)
        # Padding has β = 0. Its scores could enter only a maximum.
        keys = frame.k_valid if leaf.normalize == "rows" else None
        frame = frame.replaced(q_valid=None, k_valid=keys)
        mask = Mask(frame, s, 0, window=leaf.window, strict=True)
        workspace: Scratch | None = None
        height = size * _blocks_per_row_block(leaf, size, s, gradient)
        for part in head_groups(b, n, height * s, ENTRIES):
            group, group_mask = view.group(part), mask.of_sequences(part[0])
            # The first group is the largest.
            workspace = workspace or self.ops.scratch(_row_block_size(group, height), view.k)
            given = (self.ops, leaf, group, group_mask, size, height, workspace)
            yield part, LucidMatrix(*given, gradient=gradient)

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        ops = self.ops
        if is_one_block(self.leaf, x):
            return solve_one_block(ops, self.leaf, x, frame), ()
        s = x["k"].shape[1]
        view = self._view(x, frame, self._size(s))
        y = ops.empty(view.v.shape, view.v)
        for part, system in self._systems(view, frame):
            solution, v = y[part], system.view.v
            for i0, i1, low in system.rows():
                right = v[:, :, i0:i1, :] + 0
                if low < i0:
                    row_block = system.weights(i0, i1, low, i0)
                    known = solution[:, :, low:i0, :]
                    right = ops.add_product(right, row_block, known, -system.factor)
                for a, j0, j1 in system.blocks(i0, i1):
                    rhs = right[:, :, j0 - i0 : j1 - i0, :]
                    if i0 < j0:
                        row_block = system.weights(j0, j1, i0, j0)
                        rhs = ops.add_product(
                            rhs, row_block, solution[:, :, i0:j0, :], -system.factor
                        )
                    rhs = system.times_beta(rhs, j0, j1)
                    product_at(ops, solution, tokens_at(j0, j1), system.inverse[:, :, a, ...], rhs)
        return time_first(y)[:, :s, ...], ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        ops, leaf = self.ops, self.leaf
        s = x["k"].shape[1]
        size = self._size(s)
        view = self._view(x, frame, size)
        missing = -s % size
        y = padded(ops.heads_first(out), 0, missing)
        right = padded(ops.heads_first(cotangent), 0, missing) + 0
        d = LucidView(*(None if a is None else ops.zeros(a.shape, a) for a in view))
        d_beta: Array = d.beta
        d_w: Array = d.w
        d_path_beta: Array = d.path_beta
        for part, system in self._systems(view, frame, gradient=True):
            workspace = ops.scratch(_row_block_size(system.view, system.height), view.k)
            for i0, i1, low in system.rows(reverse=True):
                solved = self._pull_rows(system, i0, i1, low, y[part], right[part], workspace)
                d.v[part][:, :, i0:i1, :] = solved[0]
                if leaf.beta:
                    d_beta[part][:, :, i0:i1, :] = solved[1]
            scores = system.scores
            d_queries = scores.d_q[:, :, 0, ...]
            d.unit[part] = d_queries * system.scale + scores.d_k
            if isinstance(scores, TransportedScores):
                d_w[part], d_path_beta[part] = scores.extra_gradients()
        d_k = d.unit if leaf.normalize != "keys" else rms_norm_vjp(view.k, leaf.eps, d.unit)
        result = {"k": d_k, "v": d.v}
        if d.w is not None:
            result |= {"w": d.w, "beta": d.path_beta}
        if leaf.beta:
            result["lucid_beta"] = d_beta[..., 0]
        return {name: time_first(a)[:, :s, ...] for name, a in result.items()}

    def _pull_rows(
        self,
        system: LucidMatrix,
        i0: int,
        i1: int,
        low: int,
        y: Array,
        right: Array,
        workspace: Scratch,
    ) -> tuple[Array, Array]:
        """dv and dβ of a row block; updates earlier right sides and the scores' gradient."""
        ops = self.ops
        view = system.view
        solved = ops.empty(view.v[:, :, i0:i1, :].shape, right)
        d_v = solved if view.beta is None else ops.empty(solved.shape, right)
        for a, j0, j1 in reversed(system.blocks(i0, i1)):
            here, before = tokens_at(j0 - i0, j1 - i0), tokens_at(i0, j0)
            x = ops.product(transpose(system.inverse[:, :, a, ...]), right[:, :, j0:j1, :])
            if system.diagonal is not None:
                x = x / system.diagonal[:, :, j0:j1, :]
            solved[here] = x
            if view.beta is not None:
                d_v[here] = view.beta[:, :, j0:j1, :] * x
            if i0 < j0:
                row_block = transpose(system.weights(j0, j1, i0, j0))
                ops.add_product_at(right, before, row_block, d_v[here], -system.factor)
        weights = system.weights(i0, i1, low, i1)
        known = y[:, :, low:i1, :]
        d_beta: Array = None
        if self.leaf.beta:
            residual = view.v[:, :, i0:i1, :] + 0
            residual = ops.add_product(residual, weights, known, -system.factor)
            d_beta = row_sum(solved * residual)
        if low < i0:
            earlier = transpose(weights[..., : i0 - low])
            ops.add_product_at(right, tokens_at(low, i0), earlier, d_v, -system.factor)
        d_row_block = ops.product(
            d_v * -system.factor, transpose(known), workspace.shaped(weights.shape)
        )
        d_row_block = ops.multiply(d_row_block, weights)
        if system.diagonal is not None:
            d_row_block = d_row_block + self._of_diagonal(system, i0, i1, low, d_v, y)
        system.scores.pull(i0, i1, low, i1, d_row_block)
        return d_v, d_beta

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        ops, leaf = self.ops, self.leaf
        if leaf.metric != DOT or not leaf.has_unit_diagonal or frame.is_traced:
            return step_as_defined(leaf, past, x, frame)
        known = filled(frame, past["key"].shape[1])
        new = PastSystem(ops, leaf, past, x, known)
        t = x["k"].shape[1]
        v = ops.heads_first(x["v"])
        right = ops.empty(v.shape, v)
        b, n, _, _ = v.shape
        size = block_size(t)
        for part in head_groups(b, n, size * max(known.count, 1)):
            for i0, i1 in blocks(t, size):
                rhs = v[part][:, :, i0:i1, :]
                if known.count:
                    row_block = new.weights(part, i0, i1)
                    rhs = ops.add_product(rhs + 0, row_block, new.solved[part], -new.factor)
                right[part][:, :, i0:i1, :] = rhs
        y = self.among_new(x, right, known, frame)
        updates: Updates = {"key": Append(x["k"]), "solved": Append(y)}
        if new.new_rms is not None:
            updates["rms"] = Append(new.new_rms[..., 0])
        return y, updates

    def among_new(self, x: Arrays, right: Array, known: FilledPart, frame: Frame) -> Array:
        """y of new tokens (b, t, n, e), from v minus the contribution of the cache (b, n, t, e)."""
        t = right.shape[2]
        right = time_first(right)
        if t > 1:
            return self.forward({**x, "v": right}, new_tokens(frame, t))[0]
        # The matrix of one token is its diagonal.
        y = x["lucid_beta"][..., None] * right if self.leaf.beta else right
        if known.offset is None:
            valid = frame.valid_keys(t)
            assert valid is not None
            y = zero_where_not(valid[:, :, None, None], y)
        return y

    def _of_diagonal(
        self, system: LucidMatrix, i0: int, i1: int, low: int, d_v: Array, y: Array
    ) -> Array:
        """The gradient of the scores through δ and through the row maximum."""
        column = arange_like(i1, y)[low:]
        is_diagonal = column == arange_like(i1, y)[i0:i1, None]
        assert system.diagonal is not None
        d_diagonal = row_sum(d_v * y[:, :, i0:i1, :]) * system.diagonal[:, :, i0:i1, :]
        d_row_block = zero_where_not(is_diagonal, -d_diagonal)
        if system.at_maximum is not None and not self.leaf.detach_max:
            first = system.at_maximum[:, :, i0:i1, :] == column
            d_maximum = row_sum(d_v * system.view.v[:, :, i0:i1, :])
            d_row_block = d_row_block + zero_where_not(first, d_maximum)
        return d_row_block


def _blocks_per_row_block(leaf: pa.LucidSolve, size: int, s: int, gradient: bool) -> int:
    """Height of a row block in blocks; with transported scores, one chunk of reflections.

    The gradient has several row blocks at once: where they are long, they are one block high.
    """
    long = 2 * size * s > budget(ROW_BLOCK_ENTRIES)
    return 1 if isinstance(leaf.metric, Transported) or (gradient and long) else 2


def _row_block_size(view: LucidView, rows: int) -> int:
    """Entries of a row block of these heads, with all keys."""
    entries: int = math.prod(view.k.shape[:3]) * rows
    return entries


def _padded_frame(frame: Frame, s: int) -> Frame:
    """The keys among themselves, followed by the padding to whole blocks."""
    frame = frame.among_keys(frame.k_position.shape[1])
    missing = s - frame.k_position.shape[1]
    if not missing:
        return frame
    xp = namespace(frame.k_position)
    position = arange_like(s, frame.k_position)[None, :]
    valid, segment = frame.k_valid, frame.k_segment
    if valid is not None:
        valid = padded(valid, 0, missing, axis=1)
    if segment is not None:
        segment = xp.concat([segment, *[segment[:, -1:]] * missing], axis=1)
    return Frame(position, position, None, valid, segment, segment)
