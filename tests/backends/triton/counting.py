"""Counts the exponentials of kernels in the interpreter."""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

from triton.runtime import interpreter

from precondattn_kernel_tools.triton_products import outermost_function

BUILDER = interpreter.InterpreterBuilder


@contextmanager
def counted_exponentials():
    """Exponentials of all kernels inside, by kernel."""
    counted: Counter[str] = Counter()
    exponential = BUILDER.create_exp

    def counting(self, x):
        counted[outermost_function()] += x.data.size
        return exponential(self, x)

    with patch.object(BUILDER, "create_exp", counting):
        yield counted
