"""Softmax attention as an algorithm of the backend: full calls in tiles, and steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

from jax import Array

import precondattn as pa
from precondattn.arrays import Arrays, Residuals
from precondattn.backend import ArraySpec
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_jax.attention_step import attention_step
from precondattn_jax.definition import few_tokens_at_a_time, step_as_defined
from precondattn_jax.grouped_attention import GroupedAttention, has_groups
from precondattn_jax.tiled_attention import TiledAttention
from precondattn_jax.transported_step import transported_step
from precondattn_portable.algorithm import Algorithm


def _full_call(leaf: SoftmaxAttention, x: Mapping[str, Array], frame: Frame) -> TiledAttention:
    return (GroupedAttention if has_groups(leaf, frame) else TiledAttention)(leaf, x, frame)


class AttentionBlocks(Algorithm[SoftmaxAttention]):
    """Algorithm of `Softmax` and `Path`."""

    name = "tiled attention"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        out, log_total = _full_call(self.leaf, x, frame).forward()
        return out, (log_total,)

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        return _full_call(self.leaf, x, frame).backward(out, residuals[0], cotangent)

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        leaf = self.leaf
        if leaf.metric != DOT:
            step = partial(transported_step, cast("pa.Path", leaf))
            return few_tokens_at_a_time(step, leaf, past, x, frame)
        if leaf.forget != "none":
            return step_as_defined(leaf, past, x, frame)
        out = attention_step(leaf, dict(past), dict(x), frame)
        return out, {"key": Append(x["k"]), "value": Append(x["v"])}

    def residual_shapes(self, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        (b, t, h, _), dtype = inputs["q"]
        return (ArraySpec((b, t, h), dtype if dtype == "float64" else "float32"),)
