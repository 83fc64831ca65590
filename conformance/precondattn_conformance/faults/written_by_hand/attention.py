"""Faults of attention and of the pieces around it: masks, ranges, solves and positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from precondattn.arrays import Array, namespace
from precondattn.cache import Append
from precondattn.spec import lucid, nystrom, softmax
from precondattn.spec.array_functions import finite_or_zero
from precondattn.spec.laser import LogMeanExp
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    with_call,
    written,
)
from precondattn_portable import read_mean
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.block_conjugate_gradients import Residual

RUN = (FORWARD, STEP)
BOTH = (FORWARD, BACKWARD)
ALL = (*BOTH, STEP)


def _finite_mask(visible: Array, scores: Array) -> Array:
    return namespace(scores).where(visible, scores, -1e9)


def _alone(call: MethodCall) -> MethodCall:
    """New tokens attend to themselves and cached keys, but not to each other."""
    frame = call.frame
    t = frame.q_position.shape[1]
    later = namespace(frame.q_position).arange(t)[None, :] * 1_000_000
    position = namespace(later).concat([frame.k_position[:, :-t], frame.q_position + later], axis=1)
    return call.with_frame(k_position=position)


def _of_row(call: MethodCall) -> MethodCall:
    """Every segment uses the prefix length of the first segment in its row."""
    frame = call.frame
    if frame.q_prefix is None or frame.k_segment is None:
        return call
    of_row = np.broadcast_to(np.asarray(frame.q_prefix)[:, :1], frame.q_prefix.shape)
    return call.with_frame(q_prefix=of_row)


def _of_next(call: MethodCall) -> MethodCall:
    pairs = call.frame.pairs
    return call if pairs is None else call.with_frame(pairs=np.roll(np.asarray(pairs), 1, axis=0))


def _laser_of_one_shift(self: LogMeanExp, log_weights: Array, log_total: Array, v: Array) -> Array:
    xp = namespace(v)
    shift = xp.max(v, axis=2, keepdims=True)
    mean = xp.exp(log_weights) @ xp.exp(v - shift)
    is_visible = xp.max(log_weights, axis=-1, keepdims=True) > -xp.inf
    return xp.where(is_visible, shift + xp.log(xp.where(is_visible, mean, 1.0)), 0.0)


def _keeping_v(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    return replace(result, updates={**result.updates, "solved": Append(call.inputs["v"])})


def _shifted_by_first(
    ops: Arithmetic, row_block: Array, sink: Array | None = None
) -> tuple[Array, Array, Array]:
    xp = namespace(row_block)
    shift = finite_or_zero(xp.max(row_block[..., :2], axis=-1, keepdims=True))
    row_block = ops.exp(ops.add(row_block, -shift))
    total = xp.sum(row_block, axis=-1, keepdims=True)
    total = xp.where(total > 0, total, 1.0)
    return row_block, total, shift + xp.log(total)


FAULTS = [
    written(
        "softmax",
        RUN,
        "masked pairs at -1e9: a query without keys reads the mean",
        inside(softmax, "mask_scores", lambda _: _finite_mask),
    ),
    written("softmax", STEP, "new tokens do not attend to one another", with_call(_alone)),
    written("softmax", BOTH, "a prefix of the row, not of its segment", with_call(_of_row)),
    written("softmax", ALL, "the attn_mask of another sequence", with_call(_of_next)),
    written(
        "laser",
        ALL,
        "one shift for all tokens, future ones included",
        inside(LogMeanExp, "forward", lambda _: _laser_of_one_shift),
        subject="softmax",
    ),
    written(
        "lucid_solve[normalize=rows]",
        FORWARD,
        "a row's maximum taken over the future too",
        inside(lucid, "mask_scores", lambda _: lambda visible, scores: scores),
    ),
    written("lucid_solve", STEP, "v kept in place of y", _keeping_v),
    written(
        "nystrom[landmarks=4]",
        BOTH,
        "padding in the means",
        inside(nystrom, "segment_means", lambda true: lambda m, like, *masks: true(m, like)),
    ),
    written(
        "softmax",
        FORWARD,
        "the maximum over a row's first keys as that of the whole row",
        inside(read_mean, "exponentials", lambda _: _shifted_by_first),
        carrier="blocks",
    ),
    written(
        "symmetric_lucid_solve",
        BOTH,
        "the residual not examined",
        inside(Residual, "is_large", lambda _: lambda self: self.length < 0),
        carrier="blocks",
    ),
]
