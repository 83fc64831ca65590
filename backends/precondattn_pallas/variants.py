"""Every kernel as it is shipped, to be compiled where there is no GPU.

    python -m precondattn_conformance.kernels.pallas_compiler precondattn_pallas.variants …

The backend's own launching code is traced with arrays without values, and its kernels are found in
what JAX makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

import precondattn as pa
from precondattn.frame import Frame
from precondattn_conformance.kernels.pallas_compiler import TPU, Variant
from precondattn_pallas.attention import Attention
from precondattn_pallas.lucid_solve import LucidSolve
from precondattn_pallas.recurrence import Recurrence

CALLS: tuple[tuple[str, tuple[str, ...], tuple[tuple[int, int], ...]], ...] = (
    ("lucid_solve[beta=true]", ("bfloat16",), ((256, 256), (128, 128), (64, 64))),
    ("lucid_solve", ("float32",), ((256, 256), (128, 128), (64, 64))),
    ("softmax", ("bfloat16", "float16"), ((256, 256), (128, 128), (64, 64))),
    ("softmax", ("float32",), ((128, 128), (64, 64))),
    ("gated_delta", ("bfloat16", "float32"), ((256, 256), (128, 128), (64, 64))),
)
"""Mechanisms, dtypes, and widths of keys and values; what is narrower has the same tiles."""
KERNELS: dict[type, Any] = {
    pa.LucidSolve: LucidSolve,
    pa.Softmax: Attention,
    pa.GatedDelta: Recurrence,
}
TOKENS, HEADS, KEY_HEADS, BATCH = 4096, 16, 4, 2
WIDE_SPILLS = 1024
"""Bytes that a thread may spill where rows are wider than 128."""


def variants(target: str) -> Iterator[Variant]:
    """Forward and backward of every mechanism in every configuration."""
    if target == TPU:
        return
    for expression, dtypes, widths in CALLS:
        for dtype in dtypes:
            for d, e in widths:
                yield from _of_call(expression, dtype, d, e)


def _of_call(expression: str, dtype: str, d: int, e: int) -> Iterator[Variant]:
    leaf = pa.parse(expression).program.leaves[0]
    sizes = {
        "b": BATCH,
        "h": HEADS,
        "n": KEY_HEADS,
        "u": HEADS,
        "t": TOKENS,
        "s": TOKENS,
        "d": d,
        "e": e,
    }
    x = {n: _empty(pattern.shape(sizes), dtype) for n, pattern in leaf.inputs.items()}
    frame = {"k_segment": _empty((BATCH, TOKENS), "int32")}
    kernels = KERNELS[type(leaf)](interpret=False)

    def forward(x: Any, frame: Any) -> Any:
        return kernels.forward(leaf, x, _frame(frame))

    out, residuals = jax.eval_shape(forward, x, frame)

    def backward(x: Any, frame: Any, out: Any, residuals: Any, cotangent: Any) -> Any:
        return kernels.backward(leaf, x, _frame(frame), out, residuals, cotangent)

    name = f"{expression} {dtype} {d}" + ("" if d == e else f"x{e}")
    limit = 0 if max(d, e) <= 128 else WIDE_SPILLS
    yield Variant(name, forward, (x, frame), limit)
    yield Variant(f"{name} backward", backward, (x, frame, out, residuals, out), limit)


def _frame(masks: dict[str, Any]) -> Frame:
    """Of a full call. Positions are known without looking."""
    return Frame(None, None, **masks)


def _empty(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
