"""Every kernel as it is shipped, to be compiled on a machine without a GPU or TPU.

    python -m precondattn_kernel_tools.pallas_compiler precondattn_pallas.variants …

The backend's own launching code is traced with abstract arrays, and its kernels are extracted from
JAX's trace.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.arrays import Array, Arrays
from precondattn.frame import Frame
from precondattn_kernel_tools.pallas_compiler import TPU, Variant
from precondattn_pallas.backend import CUDA, kernels_of

# Listed by hand: a variant is a whole call, and one recurrence stands for all with its kernels.
CALLS: tuple[tuple[str, tuple[str, ...], tuple[tuple[int, int], ...]], ...] = (
    ("lucid_solve[beta=true]", ("bfloat16",), ((256, 256), (128, 128), (64, 64))),
    ("lucid_solve", ("float32",), ((256, 256), (128, 128), (64, 64))),
    ("softmax", ("bfloat16", "float16"), ((256, 256), (128, 128), (64, 64))),
    ("softmax", ("float32",), ((128, 128), (64, 64))),
    ("gated_delta", ("bfloat16", "float32"), ((256, 256), (128, 128), (64, 64))),
    ("gated_delta", ("float16",), ((256, 256), (128, 128))),
    ("gla", ("float16",), ((128, 128),)),
    ("gla", ("bfloat16", "float32"), ((256, 256), (128, 128), (64, 64))),
    ("gsa", ("bfloat16", "float32"), ((128, 128),)),
    ("kda", ("bfloat16", "float32"), ((256, 256), (128, 128))),
    ("kda", ("float16",), ((128, 128),)),
    ("comba", ("bfloat16", "float32"), ((256, 256), (128, 128))),
    ("erasing_gated_delta", ("bfloat16", "float32"), ((128, 128),)),
    ("erasing_kda", ("bfloat16", "float32"), ((256, 256), (128, 128))),
    ("comba", ("float16",), ((128, 128),)),
    ("preconditioned_key", ("bfloat16",), ((128, 128),)),
    ("laser", ("float16",), ((128, 128), (64, 64))),
)
"""Mechanisms, dtypes, and widths of keys and values. Narrower arrays have the same tiles."""

TPU_CALLS: tuple[tuple[str, tuple[str, ...], tuple[tuple[int, int], ...]], ...] = (
    ("lucid_solve[beta=true]", ("bfloat16",), ((256, 512), (256, 256), (128, 128), (64, 64))),
    ("lucid_solve", ("float32",), ((256, 512), (256, 256), (128, 128), (64, 64))),
    *(
        (name, ("bfloat16", "float32"), ((256, 512), (256, 256), (128, 128), (64, 64)))
        for name in ("gated_delta", "ssd")
    ),
)
"""Calls for a TPU, where widths are first padded to multiples of 128."""

STEPS = (("lucid[beta=true]", ("bfloat16", "float32"), ((256, 256), (128, 128))),)
"""Steps by one token, with dtypes and widths."""

TOKENS, BATCH, SLOTS = 4096, 2, 64
SIZES = {"b": BATCH, "h": 16, "n": 4, "u": 16, **dict.fromkeys("cts", TOKENS)}
WIDE_SPILLS = 1024
"""Bytes that a thread may spill where rows are wider than 128."""


def variants(target: str) -> Iterator[Variant]:
    """Forward and backward of every mechanism in every configuration."""
    device = TPU if target == TPU else CUDA
    for expression, dtypes, widths in TPU_CALLS if target == TPU else CALLS:
        for dtype in dtypes:
            for d, e in widths:
                yield from _of_call(expression, dtype, d, e, device)
    for expression, dtypes, widths in () if target == TPU else STEPS:
        for dtype in dtypes:
            for width, _ in widths:
                yield _of_step(expression, dtype, width)


def _of_step(expression: str, dtype: str, width: int) -> Variant:
    """A step of LUCID by one token after those in a cache."""
    group = Group(group_of(expression))
    sizes = {**SIZES, "d": width, "e": width, "t": 1, "s": 1}
    inputs = group.inputs.extending()
    x = {name: _empty(pattern.shape(sizes), dtype) for name, pattern in inputs.items()}
    past = {
        key: _empty(pattern.shape(sizes), "float32" if slot.wide else dtype)
        for key, (slot, pattern) in group.program.slots.items()
    }
    valid = _empty((BATCH, TOKENS + 1), "bool")

    def step(past: Array, x: Array, valid: Array) -> Array:
        kernels = kernels_of(group, interpret=False)
        out, updates = kernels.step(group, past, x, Frame(None, None, None, valid))
        return out, {name: update.tokens for name, update in updates.items()}

    limit = 0 if width <= 128 else WIDE_SPILLS
    return Variant(f"lucid step {dtype} {width}", step, (past, x, valid), limit)


def _of_call(expression: str, dtype: str, d: int, e: int, device: str) -> Iterator[Variant]:
    leaf = pa.parse(expression).program.leaves[0]
    assert isinstance(leaf, pa.Leaf)
    sizes = {**SIZES, "d": d, "e": e, "m": min(d, SLOTS)}
    x = {n: _empty(pattern.shape(sizes), dtype) for n, pattern in leaf.inputs.items()}
    masks = {"k_segment": _empty((BATCH, TOKENS), "int32")}
    kernels = kernels_of(leaf, interpret=False, target=device)

    # The positions of a full call are known without arrays.
    def forward(x: Array, masks: Arrays) -> Array:
        return kernels.forward(leaf, x, Frame(None, None, **masks))

    out, residuals = jax.eval_shape(forward, x, masks)

    def backward(x: Array, masks: Arrays, *others: Array) -> Array:
        return kernels.backward(leaf, x, Frame(None, None, **masks), *others)

    name = f"{expression} {dtype} {d}" + ("" if d == e else f"x{e}")
    limit = 0 if max(d, e) <= 128 else WIDE_SPILLS
    yield Variant(name, forward, (x, masks), limit)
    yield Variant(f"{name} backward", backward, (x, masks, out, residuals, out), limit)


def _empty(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
