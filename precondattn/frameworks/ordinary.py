"""Exporting calls as PyTorch's own operators, which run without this package.

By default, a call that `torch.export` traces is an operator `precondattn::*` in the graph. Within
`ordinary_operators()` it is traced as the reference computes it, in PyTorch's operators. A loop
over tokens is PyTorch's `scan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_chosen: ContextVar[bool] = ContextVar("ordinary_operators", default=False)


@contextmanager
def ordinary_operators() -> Iterator[None]:
    """A context in which `torch.export` and `torch.onnx.export` write PyTorch's own operators.

    In this context, an exported call is written as the reference computes it, for any batch size
    and number of tokens. The program runs without this package, and ONNX can represent it. For
    attention with scores its memory is quadratic in the number of tokens, and a recurrence runs
    token by token. Calls that are not exported are not affected. Without the context, exported
    calls are operators `precondattn::*`.

    Raises
    ------
    UnsupportedError
        when a call is exported that names a backend other than `"reference"`, or a recurrence with
        an input that requires a gradient.

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


def is_chosen() -> bool:
    """Whether this context is `ordinary_operators()`."""
    return _chosen.get()
