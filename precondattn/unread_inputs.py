"""Leaves that do not read an input that they declare, and their gradient in PyTorch.

Autograd of a leaf's own operations reaches only what they read. PyTorch makes the gradient of any
other input, and its zeros have no axis of several cotangents:

    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    options = {"is_grads_batched": True, "materialize_grads": True}
    torch.autograd.grad(x.sin(), (x, y), torch.eye(3), **options)[1].shape  # (3,), and not (3, 3)

An operator, which has the leaf's `backward` as its gradient, reaches all inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.backend import Request


def needs_operator(leaf: Piece, request: Request) -> bool:
    """Whether autograd would not reach all inputs of a full call of a leaf.

    Differentiation by torch.func has no operators, and makes these zeros as its maps need them.
    """
    is_recorded = request.library == "torch" and request.differentiated and not request.transformed
    if not is_recorded or request.verb.startswith("extend"):
        return False
    return not all(each.reads_all_inputs for each in leaf.program.leaves)
