"""Every kernel as it is shipped, to be compiled on a machine without a GPU.

    python -m precondattn_kernel_tools.cuda_compiler precondattn_cupy.variants …

The backend's own launching code runs, and its launches are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn.kernel_backend.backend import KernelRunner
from precondattn.kernel_backend.limits import LEAST_EPS
from precondattn_cupy.backend import Cupy
from precondattn_cupy.launch import CudaLaunch, recorded, source
from precondattn_kernel_tools.cuda_compiler import Variant

HALF, ALL = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")
WIDE = ("bfloat16", "float32", "float64")
Shipped = tuple[tuple[str, tuple[str, ...], tuple[tuple[int, int], ...]], ...]
"""Mechanisms, dtypes, and widths of keys and values. Narrower arrays have the same tiles."""

# The list is written by hand: one recurrence stands for all that have its kernels, and a test
# launches the others.
CALLS: Shipped = (
    ("unit_rows", WIDE, ((64, 64),)),
    ("unit_rows[detach=false]", WIDE, ((64, 64),)),
    # A smaller eps would give no gradient in float16.
    (f"unit_rows[eps={LEAST_EPS}]", ("float16",), ((64, 64),)),
    (f"unit_rows[eps={LEAST_EPS},detach=false]", ("float16",), ((64, 64),)),
    ("lucid_solve[beta=true]", ALL, ((16, 16), (32, 32), (64, 64), (128, 128), (256, 128))),
    ("lucid_solve[normalize=given,beta=true]", HALF, ((64, 64), (128, 128), (256, 128))),
    ("softmax", ALL, ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (256, 512))),
    ("laser", ("float16",), ((16, 16), (32, 32), (64, 64), (128, 128))),
    ("laser", ("bfloat16", "float32"), ((16, 16), (32, 32), (64, 64), (128, 128), (256, 512))),
    *((name, ALL, ((32, 32), (64, 64), (128, 128), (256, 512))) for name in ("kda", "erasing_kda")),
)
"""Full calls, with their gradients."""

STEPS: Shipped = (
    ("lucid[beta=true]", ALL, ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256))),
    ("softmax", ALL, ((16, 16), (32, 32), (64, 64), (128, 128), (256, 128))),
    ("laser", ALL, ((16, 16), (32, 32), (64, 64), (128, 128), (256, 128))),
)
"""Extensions of a cache by one token."""

TOKENS, HEADS, BATCH, SLOTS = 1024, 2, 1, 64
WIDE_SPILLS = 0
"""Bytes that a thread may spill where rows are wider than 128."""


def variants(target: str) -> Iterator[Variant]:
    """Every instance of every kernel, once."""
    yielded = set()
    for is_step, shipped in ((False, CALLS), (True, STEPS)):
        for mechanism, dtypes, widths in shipped:
            for dtype in dtypes:
                for d, e in widths:
                    for launch in launches(mechanism, dtype, d, e, is_step):
                        if launch.kernel not in yielded:
                            yielded.add(launch.kernel)
                            yield _variant(launch, WIDE_SPILLS if max(d, e) > 128 else 0)


def _variant(launch: CudaLaunch, spill_limit: int) -> Variant:
    return Variant(
        launch.kernel,
        source(launch.file),
        launch.kernel,
        dynamic_shared_bytes=launch.shared_bytes,
        spill_limit=spill_limit,
        threads=launch.threads,
    )


def launches(
    expression: str, dtype: str, d: int, e: int, is_step: bool = False
) -> list[CudaLaunch]:
    """The launches of a call with its gradient, or of a step."""
    mechanism = pa.parse(expression)
    is_group = len(mechanism.program.calls) > 1
    leaf = mechanism.program.leaves[0]
    assert isinstance(leaf, pa.Leaf)
    piece: Piece = Group(group_of(expression)) if is_group else leaf
    inputs = piece.inputs.extending() if is_step else piece.inputs
    sizes = {"b": BATCH, "h": HEADS, "n": HEADS, "u": HEADS, "c": TOKENS}
    sizes |= {"d": d, "e": e, "m": SLOTS}
    sizes |= {"t": 1, "s": 1} if is_step else {"t": TOKENS, "s": TOKENS}
    x = {name: _zeros(pattern.shape(sizes), dtype) for name, pattern in inputs.items()}
    runner = KernelRunner(Cupy(), piece)
    # Launches are only recorded, so outputs are uninitialised memory.
    with recorded() as recorded_launches, np.errstate(all="ignore"):
        if is_step:
            past = {
                key: _zeros(pattern.shape(sizes), "float32" if slot.wide else dtype)
                for key, (slot, pattern) in piece.program.slots.items()
            }
            new = np.full((BATCH, 1), TOKENS)
            slots = np.arange(TOKENS + 1)[None]
            runner.step(past, x, Frame(new, slots, None, slots <= TOKENS))
        else:
            position = np.arange(TOKENS)[None]
            frame = Frame(position, position)
            out, residuals = runner.forward(x, frame)
            runner.backward(x, frame, out, residuals, np.zeros_like(out))
    return recorded_launches


def _zeros(shape: tuple[int, ...], dtype: str) -> Array:
    return np.zeros(shape, getattr(ml_dtypes, dtype, None) or dtype)
