"""Softmax attention, one row block at a time (`layout.py`), for every metric and read.

    forward:   S = s ⟨q, k⟩ (capped) + decay + bias, −∞ at masked pairs;  read S (`read_mean.py`, …)
    backward:  recompute S from q and k;  dS from the read;  then through bias, decay and scores.

The metric is the dot product or PaTH's. The read is what is computed from S and v: the weighted
mean, or LASER's log-mean-exp. A row block has a block of queries and all keys that they attend to.
Residuals: λ, the log-sum-exp of each row, which includes a sink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, cast

from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.backend import ArraySpec
from precondattn.cache import Append, Replace, Updates
from precondattn.frame import Frame, has_lengths_only
from precondattn.spec.array_functions import row_sum, swap_time_and_heads, transpose
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.metric import DOT
from precondattn.spec.path import Path
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM, Read
from precondattn.spec.softmax import SoftmaxAttention, sink_vjp
from precondattn.spec.transported import Transported
from precondattn_portable import prefix_and_window
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Scratch
from precondattn_portable.distance import (
    DistantScores,
    added_in_step,
    by_position_ahead,
    by_position_ahead_vjp,
)
from precondattn_portable.extension import (
    bias_of_filled,
    few_tokens_at_a_time,
    filled,
    past_columns,
    past_heads,
    read_of_parts,
    step_as_defined,
)
from precondattn_portable.forget_gate import ForgetGate
from precondattn_portable.layout import (
    Part,
    Tile,
    block_size,
    blocks,
    grouped_bias,
    grouped_queries,
    groups_with_scratch,
    head_groups,
    of_heads,
    padded,
    queries_by_key_head,
    time_first,
    ungrouped,
    zero_padding,
)
from precondattn_portable.masks import Mask
from precondattn_portable.prefix_and_window import PartOfQueries, parts_of
from precondattn_portable.read_log_mean_exp import LogMeanExpRead
from precondattn_portable.read_mean import MeanAndLogSumRead, MeanRead, ReadRows, are_far
from precondattn_portable.scores import (
    BiasedScores,
    CappedScores,
    DotScores,
    Scores,
    biased,
    capped_in_place,
)
from precondattn_portable.transported import TransportedScores
from precondattn_portable.transported_step import transported_step


class AttentionView(NamedTuple):
    """Arrays of a call, reordered: heads before time, queries grouped by key head."""

    q: Array
    """(b, n, r, t, d), times the scale"""
    k: Array
    """(b, n, s, d)"""
    v: Array
    """(b, n, s, e)"""
    w: Array | None
    """PaTH's directions (b, n, s, d)"""
    beta: Array | None
    """(b, n, s)"""
    g: Array | None
    """(b, n, r, s)"""
    sink: Array | None
    """(b, n, r)"""
    bias: Array | None
    """(b or 1, n or 1, r or 1, t, s)"""
    distance: Array | None
    """The bias for each distance (n, r, t + s); not in a step"""

    def group(self, part: Part) -> AttentionView:
        """Some sequences and some key heads."""
        of_pairs = None if self.bias is None else of_heads(self.bias, part)
        distance = None if self.distance is None else self.distance[part[1], ...]
        others = self._replace(bias=None, distance=None)
        cut = AttentionView(*[a if a is None else a[part] for a in others])
        return cut._replace(bias=of_pairs, distance=distance)


class HeadGroup(NamedTuple):
    """Some heads, and the objects that compute their scores and reads."""

    part: Part
    view: AttentionView
    mask: Mask
    scores: Scores
    read: MeanRead | LogMeanExpRead
    workspaces: list[Scratch]
    """The workspaces of row blocks and of their gradients."""
    size: int
    """Queries of a tile"""

    def tiles(self) -> Iterator[Tile]:
        """The tiles that are not empty; those of a forget gate end with their last query."""
        mask, t = self.mask, self.view.q.shape[3]
        if self.view.g is not None:
            return mask.tiles_to_diagonal(t, self.size, self.view.k.shape[2] - t)
        return (tile for tile in mask.tiles(t, self.size) if tile.low < tile.high)

    def row_block(self, tile: Tile) -> Array:
        """Masked scores (b, n, r (i1 − i0), high − low)."""
        scores = self.scores.row_block(tile, self.workspaces[0])
        return self.mask.apply(self.scores.ops, scores, tile)


NO_SUMS: Arrays = {}

READS: dict[Read, type[MeanRead | LogMeanExpRead]] = {
    LOG_MEAN_EXP: LogMeanExpRead,
    MEAN_AND_LOG_SUM: MeanAndLogSumRead,
}
"""The classes of all reads but the mean."""


class AttentionBlocks(Algorithm[SoftmaxAttention]):
    """Algorithm of `Softmax` and `Path`."""

    name = "row blocks of attention"

    def _view(self, x: Arrays) -> AttentionView:
        ops, leaf = self.ops, self.leaf
        (n, d), h = x["k"].shape[2:], x["q"].shape[2]
        q = grouped_queries(ops, x["q"], n) * leaf.scale_for(d)
        k, v = ops.heads_first(x["k"]), ops.heads_first(x["v"])
        w = beta = g = sink = bias = None
        if leaf.metric != DOT:
            w, beta = ops.heads_first(x["w"]), ops.heads_first(x["beta"])
        if leaf.forget != "none":
            b, s, _ = x["g"].shape
            g = ops.reshape(ops.heads_first(x["g"]), (b, n, h // n, s))
        if leaf.sink:
            xp = namespace(x["sink"])
            sink = xp.broadcast_to(xp.reshape(x["sink"], (n, h // n)), (q.shape[0], n, h // n))
        if leaf.bias:
            bias = grouped_bias(x["bias"], n)
        return AttentionView(q, k, v, w, beta, g, sink, bias, None)

    def _full_view(self, x: Arrays) -> AttentionView:
        """The reordered arrays of a full call, with the bias of distances."""
        is_added = self.leaf.distance != "none"
        return self._view(x)._replace(
            distance=by_position_ahead(self.leaf, x) if is_added else None
        )

    def _groups(
        self, view: AttentionView, frame: Frame, d: Arrays = NO_SUMS, *, gradient: bool
    ) -> Iterator[HeadGroup]:
        """Groups of heads; the gradients of a bias and of distances are added to those in `d`."""
        ops, leaf = self.ops, self.leaf
        (_, _, r, t, _), s = view.q.shape, view.k.shape[2]
        is_transported = isinstance(leaf.metric, Transported)
        size, chunk, chunks = block_size(ops.sizes, t, r), 1, 1
        if is_transported:
            sizes = ops.sizes
            chunk, chunks = (
                (sizes.chunk_of_reflections(t), 1) if gradient else sizes.chunks_in_row_block(t)
            )
            size = chunk * chunks
        if frame.q_valid is not None and not leaf.bias:
            # Outputs and cotangents of padded queries are set to 0; a bias may be NaN there.
            needless = leaf.causal and has_lengths_only(frame)
            frame = frame.replaced(q_valid=None, **({"k_valid": None} if needless else {}))
        pairs = None
        if frame.pairs is not None:
            pairs, frame = grouped_bias(frame.pairs, view.k.shape[1]), frame.replaced(pairs=None)
        mask = Mask(frame, s, self._offset(t, s), leaf.causal, leaf.window, pairs=pairs)
        row_block = r * size * (s if gradient else self.keys_of_row_block(view, mask, size))
        for part, workspaces in groups_with_scratch(ops, view.k, row_block, gradient=gradient):
            here = view.group(part)
            scores: Scores
            if is_transported:
                arrays = here.q, here.k, here.w, here.beta
                given = ops, arrays, chunk, workspaces[0], chunks
                scores = TransportedScores(*given, gradient=gradient)
            else:
                scores = DotScores(ops, here.q, here.k, gradient=gradient)
            if leaf.softcap is not None:
                scores = CappedScores(scores, leaf.softcap, gradient=gradient)
            if here.g is not None:
                scale = leaf._gate_scale(here.k.shape[3])
                scores = ForgetGate(scores, here.g, scale, s - t, gradient=gradient)
            if here.bias is not None:
                d_bias = of_heads(d["bias"], part) if gradient else None
                scores = BiasedScores(scores, here.bias, d_bias)
            if here.distance is not None:
                d_distance = d["distance"][part[1], ...] if gradient else None
                scores = DistantScores(scores, here.distance, d_distance, t)
            read = READS.get(leaf.read, MeanRead)(ops, here.v, here.sink, gradient=gradient)
            group_mask = mask.of_part(part)
            yield HeadGroup(part, here, group_mask, scores, read, workspaces, size)

    def read(self, group: HeadGroup, tile: Tile) -> tuple[Array, Array]:
        """Outputs (b, n, r (i1 − i0), e) of a tile's queries, and their λ."""
        return group.read.forward(group.row_block(tile), tile)

    def keys_of_row_block(self, view: AttentionView, mask: Mask, size: int) -> int:
        """Keys of the widest row block that `read` computes, for blocks of `size` queries."""
        return int(view.k.shape[2])

    def _offset(self, t: int, s: int) -> int | None:
        """The position of the first query among the keys."""
        return s - t

    def _parts(self, x: Arrays, frame: Frame) -> list[PartOfQueries]:
        """The parts of a call with a prefix and a window; empty if the call is computed as one.

        It is computed as one if there are distances, whose bias is indexed by a key's position.
        """
        leaf, t, s = self.leaf, x["q"].shape[1], x["k"].shape[1]
        if frame.q_prefix is None or leaf.window is None or leaf.distance != "none":
            return []
        return parts_of(
            self.ops.sizes, Mask(frame, s, self._offset(t, s), leaf.causal, leaf.window), t
        )

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        if parts := self._parts(x, frame):
            return prefix_and_window.forward(OfSomeKeys(self.ops, self.leaf), parts, x, frame)
        x, frame, missing = _aligned(self.leaf, x, frame)
        view = self._full_view(x)
        rows = view.q.shape[:4]
        o = self.ops.time_first((*rows, view.v.shape[3]), view.q, 3)
        o[...] = 0.0
        log_total = self.ops.zeros((*rows, 1), view.q)
        for group in self._groups(view, frame, gradient=False):
            for tile in group.tiles():
                read, logs = self.read(group, tile)
                where = tile.at(group.part)
                o[where] = self.ops.reshape(read, o[where].shape)
                log_total[where] = self.ops.reshape(logs, log_total[where].shape)
        out = zero_padding(ungrouped(self.ops, o), frame)[:, missing:, ...]
        return out, (ungrouped(self.ops, log_total)[:, missing:, :, 0],)

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        if parts := self._parts(x, frame):
            given = parts, x, frame, out, residuals, cotangent
            return prefix_and_window.backward(OfSomeKeys(self.ops, self.leaf), *given)
        ops, leaf = self.ops, self.leaf
        logs, cotangent, n = residuals[0], zero_padding(cotangent, frame), x["k"].shape[2]
        again = are_far(logs)
        if frame.q_valid is not None:
            # Weights of padded queries are 0, as their output is 0, whatever their scores are.
            logs = namespace(logs).where(frame.q_valid[:, :, None], logs, math.inf)
        x, frame, missing = _aligned(leaf, x, frame)
        view = self._full_view(x)
        logs = grouped_queries(ops, padded(logs, missing, 0, 1, math.inf)[..., None], n)
        out, cotangent = (
            grouped_queries(ops, padded(a, missing, 0, 1), n) for a in (out, cotangent)
        )
        cotangent = _without_overflow(cotangent, out, logs, view.sink)
        summed = {"bias": view.bias, "distance": view.distance}
        d = {name: ops.zeros(a.shape, a) for name, a in summed.items() if a is not None}
        for group in self._groups(view, frame, d, gradient=True):
            group.read.again = again
            for tile in group.tiles():
                row_block = group.row_block(tile)
                rows = ReadRows(*(tile.rows_of(a, group.part) for a in (logs, out, cotangent)))
                d_row_block = group.read.backward(row_block, tile, rows, group.workspaces[1])
                group.scores.pull(tile, d_row_block)
            of_group = {**group.scores.gradients(), "v": group.read.finish()}
            for name, array in of_group.items():
                like = getattr(view, name)
                if array.shape == like.shape:  # It has all heads and is not copied.
                    d[name] = array
                    continue
                if name not in d:
                    d[name] = ops.zeros(like.shape, like)
                d[name][group.part] = array
        gradients = self._gradients(x, d, missing)
        if leaf.sink:
            out, cotangent, logs = (ungrouped(ops, a) for a in (out, cotangent, logs))
            d_log_total = leaf.read.d_log_total(out, cotangent)
            logs, d_log_total = swap_time_and_heads(logs), swap_time_and_heads(d_log_total)
            gradients["sink"] = sink_vjp(x["sink"], logs, d_log_total)
        return gradients

    def _gradients(self, x: Arrays, d: Arrays, missing: int) -> Arrays:
        """The gradients of the inputs, from those of the view."""
        d_q = ungrouped(self.ops, d["q"])[:, missing:, ...] * self.leaf.scale_for(x["k"].shape[3])
        gradients = {"q": d_q}
        for name in ("k", "v", "w", "beta"):
            if name in d:
                gradients[name] = time_first(d[name])
        xp = namespace(d_q)
        if "g" in d:
            b, _, _, s = d["g"].shape
            gradients["g"] = time_first(xp.reshape(d["g"], (b, -1, s)))
        if "bias" in d:
            gradients["bias"] = xp.reshape(d["bias"], x["bias"].shape)[:, :, missing:, :]
        if "distance" in d:
            gradients |= by_position_ahead_vjp(self.leaf, x, d["distance"])
        return gradients

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        ops, leaf = self.ops, self.leaf
        if leaf.forget != "none" or frame.is_traced:
            return step_as_defined(leaf, past, x, frame)
        if leaf.metric != DOT:
            step = partial(transported_step, ops, cast("Path", leaf))
            return few_tokens_at_a_time(step, leaf, past, x, frame)
        n, t = x["k"].shape[2], x["q"].shape[1]
        has_others = leaf.bias or leaf.sink or leaf.distance != "none"
        is_plain = leaf.read == MEAN and leaf.softcap is None and not has_others
        if t == 1 and frame.held is not None and is_plain:
            return self._step_of_one_token(past, x, frame)
        xp, known = namespace(x["q"]), filled(frame, past["key"].shape[1])
        if leaf.bias:
            x = {**x, "bias": bias_of_filled(x["bias"], frame, known)}
        view = self._view(x)
        b, _, r, _, _ = view.q.shape
        cached_k, cached_v = (past_heads(past[slot], known.count) for slot in ("key", "value"))
        s = known.count + t
        pairs = None if frame.pairs is None else grouped_bias(known.frame.pairs, n)
        known_frame = known.frame.replaced(pairs=None)
        mask = Mask(known_frame, s, known.offset, window=leaf.window, pairs=pairs)
        o = ops.time_first((b, n, r, t, view.v.shape[3]), view.q, 3)
        size = block_size(ops.sizes, t, r)
        for part in head_groups(ops.sizes, b, n, r * size * s):
            group, group_mask = view.group(part), mask.of_part(part)
            keys, values = [cached_k[part], group.k], [cached_v[part], group.v]
            for i0, i1 in blocks(t, size):
                tile = Tile(i0, i1, 0, s)
                rows = tile.rows_of(group.q)
                row_block = xp.concat([ops.product(rows, transpose(key)) for key in keys], axis=-1)
                if leaf.softcap is not None:
                    row_block = capped_in_place(ops, row_block, leaf.softcap)
                if group.bias is not None:
                    row_block = biased(ops, row_block, group.bias[..., i0:i1, :])
                if leaf.distance != "none":
                    more = added_in_step(leaf, x, part, known.frame, tile)
                    row_block = biased(ops, row_block, more)
                row_block = group_mask.apply(ops, row_block, tile)
                result = read_of_parts(ops, leaf.read, row_block, values, group.sink)
                where = tile.at(part)
                o[where] = xp.reshape(result, o[where].shape)
        return ungrouped(ops, o), {"key": Append(x["k"]), "value": Append(x["v"])}

    def _step_of_one_token(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        """A step of one token, if all sequences have equally many cached tokens, all visible.

            S = s q Kᵀ,    o = softmax([S, s q·k]) [V; v],    or softmax(S) V with k, v in the cache

        Cached keys and values are read in place; no array of their size is written.
        """
        ops, leaf = self.ops, self.leaf
        xp, (b, _, n, d), held = namespace(x["k"]), x["k"].shape, frame.held
        assert held is not None
        first = 0 if leaf.window is None else max(held + 1 - leaf.window, 0)
        q = queries_by_key_head(x["q"], n) * leaf.scale_for(d)
        keys, values = past["key"], past["value"]
        if frame.may_overwrite and self.ops.writes:
            # The new key and value are written to the next slots, and then read with the others.
            keys[:, held : held + 1], values[:, held : held + 1] = x["k"], x["v"]
            weights = ops.softmax(ops.product(q, past_columns(keys, held + 1, first)))
            o = ops.product(weights, past_heads(values, held + 1, first))
            updates: Updates = {"key": Replace(keys), "value": Replace(values)}
        else:
            k, v = xp.reshape(x["k"], (b, n, 1, d)), xp.reshape(x["v"], (b, n, 1, -1))
            scores = ops.product(q, past_columns(keys, held, first))
            weights = ops.softmax(xp.concat([scores, row_sum(q * k)], axis=-1))
            o = ops.product(weights[..., : held - first], past_heads(values, held, first))
            o = ops.add_multiple(o, weights[..., held - first :], v)
            updates = {"key": Append(x["k"]), "value": Append(x["v"])}
        return xp.reshape(o, (b, 1, -1, o.shape[3])), updates

    def residual_shapes(self, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        (b, t, h, _), dtype = inputs["q"]
        dtype = dtype if dtype == "float64" else "float32"
        return (ArraySpec((b, t, h), dtype),)


class OfSomeKeys(AttentionBlocks):
    """Algorithm for a subset of the keys, whose positions are read from the frame."""

    def _offset(self, t: int, s: int) -> int | None:
        return None


def _without_overflow(cotangent: Array, out: Array, log_total: Array, sink: Array | None) -> Array:
    """The cotangent, with non-finite entries set to 0 in rows without visible keys.

    The output of such a row is 0, and its λ is 0 or the sink. A norm after the attention divides by
    almost 0 there, and its gradient overflows in half precision.
    """
    xp = namespace(cotangent)
    of_nothing = 0 if sink is None else sink[..., None, None]
    is_empty = (log_total == of_nothing) & xp.all(out == 0, axis=-1, keepdims=True)
    return xp.where(is_empty & ~xp.isfinite(cotangent), 0.0, cotangent)


def _aligned(leaf: SoftmaxAttention, x: Arrays, frame: Frame) -> tuple[Arrays, Frame, int]:
    """The call, and how many queries were prepended.

    Chunks of reflections are aligned to key positions, and need a query at every position.
    """
    s = x["k"].shape[1]
    missing = s - x["q"].shape[1] if leaf.metric != DOT else 0
    if not missing:
        return x, frame, 0
    x = {**x, "q": padded(x["q"], missing, 0, axis=1)}
    if leaf.bias:
        x["bias"] = padded(x["bias"], missing, 0)
    # `among_keys` masks the queries of masked keys, which here still attend to other keys.
    q_valid = frame.q_valid
    if q_valid is not None:
        q_valid = padded(q_valid, missing, 0, axis=1)
    return x, frame.among_keys(s).replaced(q_valid=q_valid), missing
