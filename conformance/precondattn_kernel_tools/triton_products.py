"""Counts the FLOPs of the products that kernels make in Triton's interpreter, by kernel.

    with counted_products() as counted:
        backend.forward(mechanism, inputs, frame)
    counted["update"]

A product of tiles (rows × depth) and (depth × columns) is 2 rows depth columns FLOPs, and three
times as many with three products of tf32 in place of one of float32. The kernel is the outermost
function of a launch.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from precondattn_kernel_tools.foreign import Handle, Interpreter
from precondattn_kernel_tools.triton_interpreter import patch_interpreter

interpreter: Interpreter = importlib.import_module("triton.runtime.interpreter")


@contextmanager
def counted_products(of_heads: int = 1) -> Iterator[Counter[str]]:
    """Context in which FLOPs of products are added to the counter that it gives.

    With `of_heads`, a launch runs the programs of the first of that many heads only, and counts
    them so many times. Its grid's second axis has the heads, if it has more than one program, and
    otherwise the first axis has them one after another. Results of the other heads are undefined.
    """
    patch_interpreter()
    counted: Counter[str] = Counter()
    times = [1]
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    product, run = builder.create_dot, executor.__call__

    def counting(
        self: Interpreter, a: Handle, b: Handle, total: Handle, precision: object, imprecise: object
    ) -> Handle:
        rows, depth = a.data.shape
        parts = 3 if str(precision).lower().endswith("tf32x3") else 1
        counted[outermost_function()] += times[0] * parts * 2 * rows * depth * b.data.shape[1]
        return product(self, a, b, total, precision, imprecise)

    def of_one_head(self: Interpreter, *args: object, **kwargs: object) -> None:
        grid = (*self.grid, 1)[:2]
        axis = 1 if grid[1] > 1 else 0
        if grid[axis] % of_heads == 0:
            first = grid[axis] // of_heads
            self.grid = (*self.grid[:axis], first, *self.grid[axis + 1 :])
            times[0] = of_heads
        run(self, *args, **kwargs)
        times[0] = 1

    with (
        patch.object(builder, "create_dot", counting),
        patch.object(executor, "__call__", of_one_head),
    ):
        yield counted


def outermost_function() -> str:
    """The name of the kernel that runs: of the outermost function within a launch."""
    frame, found = sys._getframe(), ""
    while frame.f_code.co_name != "watched_launch":
        is_kernel = not frame.f_globals["__name__"].startswith(("triton.", __package__))
        found = frame.f_code.co_name if is_kernel else found
        assert frame.f_back is not None
        frame = frame.f_back
    return found
