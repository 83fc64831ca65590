"""What PyTorch does with calls now: transforms, recorders and counters."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from precondattn.frameworks.types import Tree

_functorch = torch._C._functorch


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
