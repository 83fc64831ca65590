"""PyTorch: its tensors, and calls on them: autograd, compilers, transforms, several devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precondattn.cache.kinds import holding
from precondattn.frameworks.framework import INF, Framework, repeats_entries
from precondattn.frameworks.ordinary import is_chosen
from precondattn.frameworks.torch import autocast, scan, solve
from precondattn.frameworks.torch.modes import (
    check_context_parallel,
    counts_flops,
    has_tangent,
    is_proxied,
    is_transformed,
    only_computes,
)
from precondattn.frameworks.types import Array, Step, Token, Tree

if TYPE_CHECKING:
    from precondattn.cache import Cache
    from precondattn.dispatch.plan import PlannedCall
    from precondattn.execution.arguments import BoundCall

_FAKE = frozenset({"FakeTensor", "FunctionalTensor"})

_DESCRIPTION = attrgetter("dtype", "shape", "device", "requires_grad", "layout")

_functorch = torch._C._functorch


class PyTorch(Framework):
    reads_at_once, ignores_errors = True, False
    check_division = staticmethod(check_context_parallel)
    cast_inputs = staticmethod(autocast.cast_inputs)
    without_autocast = staticmethod(autocast.off)

    def device_of(self, array: Tensor) -> str:
        return str(array.device.type)

    def exact_device(self, array: Tensor) -> torch.device:
        return array.device

    def storage_of(self, array: Tensor) -> str | None:
        if array.is_nested:
            return "nested"
        return None if array.layout == torch.strided else str(array.layout).rpartition(".")[2]

    def is_traced(self, array: Tensor) -> bool:
        if torch.compiler.is_compiling() or array.is_meta or self.is_captured(array):
            return True
        return is_transformed(array) or type(array).__name__ in _FAKE or is_proxied()

    def has_only_a_shape(self, array: Tensor) -> bool:
        return (array.is_meta or type(array).__name__ in _FAKE) and not is_proxied()

    def is_captured(self, array: Tensor) -> bool:
        return bool(array.is_cuda and torch.cuda.is_current_stream_capturing())

    def is_ordinary(self, array: Tensor) -> bool:
        # The choice is asked last: `torch.compile` can not trace it.
        return bool(torch.compiler.is_exporting()) and is_chosen()

    def is_far(self, array: Tensor) -> bool:
        return array.device.type != "cpu" and not self.is_traced(array)

    def is_recorded_by_jit(self) -> bool:
        return torch._C._get_tracing_state() is not None

    def only_computes(self) -> bool:
        return only_computes()

    def description(self, array: Tensor) -> Callable[[Tensor], Tree] | None:
        is_plain = type(array) in (Tensor, torch.nn.Parameter)
        return _DESCRIPTION if is_plain else None

    def state_of_calls(self, array: Tensor) -> Tree:
        if not only_computes():
            return None
        device = array.device.type
        try:
            autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        except RuntimeError:  # A device without autocast.
            autocast = False
        return torch.is_grad_enabled(), autocast

    def wants_gradient(self, *arrays: Tensor) -> bool:
        # A transformed tensor does not show whether the wrapped one requires a gradient.
        return bool(torch.is_grad_enabled()) and any(
            a.requires_grad or is_transformed(a) for a in arrays
        )

    def transforms_of(self, *arrays: Tensor) -> frozenset[str]:
        """As in `Framework`. A tangent of `torch.autograd.forward_ad` counts as `"grad"` too."""
        transforms = set()
        for tensor in arrays:
            while is_transformed(tensor):
                if _functorch.is_gradtrackingtensor(tensor):
                    transforms.add("grad")
                if _functorch.is_batchedtensor(tensor):
                    transforms.add("vmap")
                tensor = _functorch.get_unwrapped(tensor)
        if not transforms and has_tangent(*arrays):
            transforms.add("grad")
        return frozenset(transforms)

    def writes_in_place(self, array: Tensor, *updates: Tensor) -> bool:
        if self.is_traced(array) and not self.is_captured(array):
            return False
        return not any(map(is_transformed, updates))  # A transform may wrap only the updates.

    def all_writable(self, arrays: Iterable[Tensor]) -> bool:
        # The usual case is decided without more calls.
        return not any(not a.is_contiguous() and 0 in a.stride() for a in arrays)

    def writable(self, array: Tensor) -> Tensor:
        return array.clone() if repeats_entries(array.shape, array.stride()) else array

    def fresh(self, array: Tensor) -> Tensor:
        return array.clone()

    def in_order(self, array: Tensor) -> Tensor:
        return array.clone(memory_format=torch.contiguous_format)

    contiguous = staticmethod(Tensor.contiguous)

    def is_of_inference(self, array: Tensor) -> bool:
        return bool(array.is_inference())

    def counted_writes(self, array: Tensor) -> int | None:
        return None if array.is_inference() else int(array._version)

    def host_integers(self, array: Tensor) -> list[int] | None:
        if array.device.type != "cpu" or self.is_traced(array):
            return None
        integers: list[int] = array.tolist()
        return integers

    def host_array(self, array: Tensor) -> Array:
        # While a transform is active, no tensor becomes a NumPy array.
        if self.is_traced(array) or _functorch.peek_interpreter_stack() is not None:
            return None
        return array.detach().cpu().numpy()

    def on_device_of(self, like: Tensor, array: Array) -> Tensor:
        # Without a device, an array of NumPy would be moved to the default one.
        tensor = array if isinstance(array, Tensor) else torch.as_tensor(array, device="cpu")
        if tensor.device == like.device:
            return tensor
        is_pinned = like.is_cuda and not self.is_traced(tensor)
        return (tensor.pin_memory() if is_pinned else tensor).to(like.device, non_blocking=True)

    def stop_gradient(self, array: Tensor) -> Tensor:
        return array.detach()

    def split_rows(self, array: Tensor, counts: Sequence[int]) -> list[Tensor]:
        return list(array.split(list(counts)))  # Its gradient is one concatenation.

    def as_index(self, array: Tensor) -> Tensor:
        return array.long()

    def sort(self, array: Tensor, axis: int) -> Tensor:
        if self.is_ordinary(array):  # ONNX can only find the largest or smallest entries.
            return array.topk(array.shape[axis], dim=axis, largest=False).values
        return super().sort(array, axis)

    def nonempty(self, array: Tensor, axis: int) -> Tensor:
        if not self.is_ordinary(array) or isinstance(array.shape[axis], int):
            return array
        shape = [*array.shape]
        shape[axis] = 1
        return torch.cat([array, array.new_full(shape, -math.inf)], dim=axis)

    def cholesky(self, matrix: Tensor) -> Tensor:
        is_ordinary = self.is_ordinary(matrix)
        return solve.cholesky(matrix) if is_ordinary else super().cholesky(matrix)

    def solve_triangular(self, matrix: Tensor, right: Tensor, *, lower: bool) -> Tensor:
        if self.is_ordinary(matrix):
            return solve.solve_triangular(matrix, right, lower=lower)
        # The general solver may never return with several threads (PyTorch 2.13, oneMKL).
        return torch.linalg.solve_triangular(matrix, right, upper=not lower)

    def running_maximum(self, array: Tensor, axis: int) -> Tensor:
        is_ordinary = self.is_ordinary(array)
        return scan.running_maximum(array, axis) if is_ordinary else array.cummax(axis).values

    def scan(
        self, step: Step, state: Tensor, inputs: Token, *, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.is_ordinary(state):
            return super().scan(step, state, inputs, reverse=reverse)
        return scan.scan(step, state, inputs, reverse=reverse)

    def linear_scan(self, factor: Tensor, value: Tensor, *, times: Step, plus: Step) -> Tensor:
        if not self.is_ordinary(value):
            return super().linear_scan(factor, value, times=times, plus=plus)
        return scan.linear_scan(factor, value, times, plus)

    def depending_on(self, zeros: Tensor, arrays: Iterable[Tensor]) -> Tensor:
        if self.wants_gradient(*arrays):
            for array in arrays:
                zeros = zeros + array.reshape(-1)[:0].sum().to(zeros.dtype)
        return zeros

    def vjp(
        self, function: Step, arrays: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """As in `Framework`: by autograd, or by `torch.func` if a transform is active."""
        all_tensors = (*arrays, *cotangents)
        if self.transforms_of(*all_tensors):
            results, pullback = torch.func.vjp(function, *arrays)
        else:
            results, pullback = _recorded(function, arrays, self.wants_gradient(*all_tensors))
        each = zip(cotangents, results, strict=True)
        gradients: tuple[Tensor, ...] = pullback(tuple(d.to(r.dtype) for d, r in each))
        return gradients

    def are_finite(self, array: Tensor, low: float | None) -> bool:
        if self.is_traced(array):
            return False
        # A sum is ten times as fast. If it overflows, the entries are read.
        total = (array.detach() if array.requires_grad else array).sum().item()
        if math.isfinite(total) or (total < INF and low == -INF):
            return True
        return super().are_finite(array, low)

    def good_along(self, array: Tensor, axes: tuple[int, ...], low: float | None) -> Tensor:
        if self.is_ordinary(array):
            return super().good_along(array, axes, low)
        # One operator that reads the array. `isfinite` is four, each with a result of its size.
        # A maximum of magnitudes is NaN or infinite if an entry is, and cannot overflow.
        values = array.detach()
        if low == -INF:
            return values.amax(axes, keepdim=True) < INF
        return torch.linalg.vector_norm(values, INF, axes, keepdim=True) < INF

    def bridge(self, planned: PlannedCall, call: BoundCall) -> Callable[..., Tensor] | None:
        from precondattn.frameworks.torch import autograd

        runner, tensors = planned.runner, tuple(call.inputs.values())
        if self.is_ordinary(tensors[0]):
            return None
        if call.prepared.is_recorded:
            return None if runner.differentiable else autograd.apply_recorded
        # PyTorch counts the FLOPs of operators, which need a gradient other than autograd's.
        is_counted = counts_flops() and "backward" not in runner.by_autograd
        is_operator = not runner.differentiable or (is_counted and not self.transforms_of(*tensors))
        return autograd.apply if is_operator else None

    def bridge_of_step(
        self, call: BoundCall, length: Tensor, planned: PlannedCall, *arrays: Tensor
    ) -> Step | None:
        from precondattn.dispatch.discovery import REFERENCE
        from precondattn.frameworks.torch import autograd

        if self.is_ordinary(length):
            return None
        if self.wants_gradient(*arrays):
            return None if planned.runner.differentiable else autograd.apply_step
        is_operator = (planned.is_symbolic or counts_flops()) and not self.transforms_of(*arrays)
        if not is_operator and planned.backend is not REFERENCE:
            is_operator = self.mapped_operators(planned, "step_backward", *arrays) is not None
        if not is_operator:
            return None
        return partial(autograd.apply_extension, length=length, count=call.count)

    def mapped_operators(self, planned: PlannedCall, gradient: str, *arrays: Tensor) -> Tree:
        if self.transforms_of(*arrays) != {"vmap"} or gradient in planned.runner.by_autograd:
            return None
        from precondattn.frameworks.torch import autograd

        return autograd

    def moved_rows(self, array: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
        if not self.wants_gradient(array):
            return None
        from precondattn.frameworks.torch.autograd import Moved

        return Moved.apply(array, *rows)

    def adopted_cache(self, cache: Cache, like: Tensor) -> Cache:
        """As in `Framework`. Dynamo can not ask whether a tensor is of inference mode."""
        if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled():
            return cache
        for array in (cache.length, *cache.store.values()):
            if isinstance(array, Tensor) and array.is_inference():
                store = {name: buffer.clone() for name, buffer in cache.store.items()}
                return holding(cache, cache.length.clone(), store)
        return cache


class DistributedPyTorch(PyTorch):
    """DTensors: each device calls a mechanism on its part of them."""

    is_distributed = True


FRAMEWORK, _DISTRIBUTED, _MASKED = PyTorch("torch"), DistributedPyTorch("torch"), Framework(None)


def framework_of(tensor: Tensor) -> Framework:
    """The framework of a tensor: that of DTensors for one, and none for a masked tensor."""
    if hasattr(tensor, "get_mask"):
        return _MASKED
    module = sys.modules.get("torch.distributed.tensor")
    is_distributed = module is not None and isinstance(tensor, module.DTensor)
    return _DISTRIBUTED if is_distributed else FRAMEWORK


def _recorded(
    function: Step, arrays: Sequence[Tensor], is_differentiated: bool
) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """The results and their pullback by PyTorch's autograd, which covers more than `torch.func`."""
    with torch.enable_grad():
        leaves = [
            array.view_as(array)
            if is_differentiated and array.requires_grad
            else array.detach().requires_grad_()
            for array in arrays
        ]
        results = function(*leaves)
    is_recorded = [result.requires_grad for result in results]
    if not any(is_recorded):
        raise RuntimeError(
            "no gradient: as PyTorch's autograd has recorded it, the result does not depend on "
            "its arguments"
        )

    def pullback(cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outs, d_outs = (list(compress(each, is_recorded)) for each in (results, cotangents))
        options = {"create_graph": is_differentiated, "materialize_grads": True}
        gradients: tuple[Tensor, ...] = torch.autograd.grad(outs, leaves, d_outs, **options)
        return gradients

    return results, pullback
