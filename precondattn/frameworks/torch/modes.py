"""What PyTorch does with calls now: transforms, recorders, counters, and context parallelism.

Inside PyTorch's own `context_parallel`, calls get a part of each sequence. It replaces
`scaled_dot_product_attention` by a function that exchanges keys and values between devices. A call
that consists of that function is correct. Any other call would be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from precondattn.frameworks.types import Tree

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.execution.arguments import BoundCall

_functorch = torch._C._functorch
_batched = torch._C._dispatch_key_parse("Batched")

PACKAGE = "torch.distributed.tensor.experimental"
"""The PyTorch package that has the context, and the functions that replace others in it."""


def is_transformed(tensor: Tensor) -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) wraps the tensor."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def is_proxied() -> bool:
    """Whether `make_fx` records a graph, which must not depend on the entries of tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def only_computes() -> bool:
    """Whether PyTorch only computes now, so that nothing traces, transforms or counts calls."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of the tensors has a tangent of `torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def check_cotangents(cotangents: Sequence[Tensor]) -> None:
    """Raise an error for the cotangents of transforms that no gradient of an operator supports."""
    if has_tangent(*cotangents):
        raise NotImplementedError(
            "forward-mode differentiation of a gradient needs tangents of the call's inputs too, "
            'or a call with backend="reference"'
        )
    if any(torch._C._dispatch_keys(d).has(_batched) for d in cotangents if d is not None):
        raise NotImplementedError(
            "is_grads_batched=True and vectorize=True use PyTorch's legacy vmap; write torch.vmap "
            "of torch.autograd.grad"
        )


def flop_counters() -> list[Tree]:
    """The counters of the active FlopCounterModes."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or not torch._C._len_torch_dispatch_stack():
        return []
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if isinstance(mode, module._FlopCounterMode)]


def counts_flops() -> bool:
    """Whether a FlopCounterMode is active."""
    return bool(flop_counters())


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
    function = torch.nn.functional.scaled_dot_product_attention
    return str(getattr(function, "__module__", "")).startswith(PACKAGE)


def _handles_attention() -> bool:
    """Whether attention on DTensors has been replaced, as in modes that replace no function."""
    dispatcher = getattr(sys.modules["torch.distributed.tensor"].DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    return str(getattr(handlers.get(attention), "__module__", "")).startswith(PACKAGE)


def _is_pytorchs_attention(call: BoundCall) -> bool:
    planned, *others = call.prepared.plan.calls
    is_alone = not others and not call.prepared.request.masks and _replaces_attention()
    is_its = planned.backend.name == "torch" and planned.runner.differentiable
    return is_alone and is_its and planned.piece.program.leaves[0].name == "softmax"
