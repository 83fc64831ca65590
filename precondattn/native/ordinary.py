"""Export to PyTorch's own operators, which programs without this package can run.

A call that `torch.export` traces is an operator `precondattn::*` in the graph. Within
`ordinary_operators()` it is what the reference computes, in PyTorch's operators; a loop over tokens
is PyTorch's `scan`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from precondattn.arrays import Array, library_of

_chosen: ContextVar[bool] = ContextVar("ordinary_operators", default=False)


@contextmanager
def ordinary_operators() -> Iterator[None]:
    """Let `torch.export` and `torch.onnx.export` write calls as PyTorch's own operators.

    In this context, a call that is exported is written as the reference computes it, for any batch
    and any number of tokens. The program runs where this package is not installed, and
    ONNX can represent it. Its memory is quadratic in the number of tokens for attention with
    scores, and a recurrence makes one step after the other. Calls that are not exported are
    computed as elsewhere. Without the context, calls are operators `precondattn::*`.

    Raises
    ------
    UnsupportedError
        in the export of a call that names a backend, other than `"reference"`, and of a recurrence
        that has an input that requires a gradient.

    Examples
    --------
    >>> import torch, precondattn as pa
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return pa.laser(q, k, v)
    >>> inputs = torch.randn(3, 2, 6, 2, 8).unbind()
    >>> tokens = torch.export.Dim("tokens")
    >>> with pa.ordinary_operators():
    ...     program = torch.export.export(
    ...         Attention(), inputs, dynamic_shapes={name: {1: tokens} for name in "qkv"}
    ...     )
    >>> any("precondattn" in str(node.target) for node in program.graph.nodes)
    False
    >>> program.module()(*torch.randn(3, 2, 40, 2, 8)).shape
    torch.Size([2, 40, 2, 8])
    """
    token = _chosen.set(True)
    try:
        yield
    finally:
        _chosen.reset(token)


def is_ordinary(array: Array) -> bool:
    """Whether `torch.export` now writes calls with such arrays as PyTorch's own operators."""
    if library_of(array) != "torch" or not sys.modules["torch"].compiler.is_exporting():
        return False
    return _chosen.get()  # Last: `torch.compile` can not trace it.
