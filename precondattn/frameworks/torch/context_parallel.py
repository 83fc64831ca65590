"""The check for PyTorch's `context_parallel`, inside which calls get a part of each sequence.

The context replaces `scaled_dot_product_attention` by a function that exchanges keys and values
between devices. A call that consists of that function is correct. Any other call would be wrong.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.execution.arguments import BoundCall

PACKAGE = "torch.distributed.tensor.experimental"
"""The PyTorch package that has the context, and the functions that replace others in it."""


def check_context_parallel(mechanism: Piece, call: BoundCall | None = None) -> None:
    """Raise an error in `context_parallel` unless the call is PyTorch's attention alone."""
    if PACKAGE not in sys.modules or not (_replaces_attention() or _handles_attention()):
        return
    if call is not None and _is_pytorchs_attention(call):
        return
    raise RuntimeError(
        f"{mechanism}: inside PyTorch's context_parallel each call gets a part of the sequence, "
        f"and only attention that PyTorch itself computes is right there: a call of softmax "
        f"without masks, on the backend 'torch'; shard batch or heads instead"
    )


def _replaces_attention() -> bool:
    """Whether `scaled_dot_product_attention` has been replaced, as by `context_parallel`."""
    function = sys.modules["torch"].nn.functional.scaled_dot_product_attention
    return str(getattr(function, "__module__", "")).startswith(PACKAGE)


def _handles_attention() -> bool:
    """Whether attention on DTensors has been replaced, as in modes that replace no function."""
    dispatcher = getattr(sys.modules["torch.distributed.tensor"].DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    attention = sys.modules["torch"].ops.aten._scaled_dot_product_flash_attention.default
    return str(getattr(handlers.get(attention), "__module__", "")).startswith(PACKAGE)


def _is_pytorchs_attention(call: BoundCall) -> bool:
    planned, *others = call.prepared.plan.calls
    is_alone = not others and not call.prepared.request.masks and _replaces_attention()
    is_its = planned.backend.name == "torch" and planned.runner.differentiable
    return is_alone and is_its and planned.piece.program.leaves[0].name == "softmax"
