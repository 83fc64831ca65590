"""PyTorch: a call and its gradient under autocast, with autocast off inside.

Autograd computes the gradients of PyTorch's own functions under the autocast state in which
`backward` is called. A call that contains such functions is therefore recorded as a separate graph,
and differentiated with autocast off. A second derivative records it again, and so does the gradient
if hooks replace saved tensors, as a checkpoint does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.algebra.call import Keeping
from precondattn.cache import Cache
from precondattn.cache.kinds import Kinds
from precondattn.execution import evaluation
from precondattn.execution.arguments import BoundCall
from precondattn.frameworks.torch.autocast import off

Function = Callable[..., tuple[Tensor, ...]]


def forward(call: BoundCall) -> Tensor:
    """`evaluation.forward` for a call whose inputs autocast has cast."""

    def evaluated(*inputs: Tensor) -> tuple[Tensor, ...]:
        bound = call._replace(inputs=dict(zip(call.inputs, inputs, strict=True)))
        return (evaluation.forward(bound),)

    (out,) = _without(call, evaluated, tuple(call.inputs.values()))
    return out


def extend(
    call: BoundCall, cache: Cache, *, donate: bool, keeping: Keeping | None
) -> tuple[Tensor, Cache]:
    """`evaluation.extend` for a call whose inputs autocast has cast."""
    keys, count_of_inputs = tuple(cache.store), len(call.inputs)
    if donate:  # Nothing is differentiated, and the given cache is emptied.
        with off(cache.length):
            return evaluation.extend(call, cache, donate=True, keeping=keeping)
    kinds: Kinds = {}

    def evaluated(*arrays: Tensor) -> tuple[Tensor, ...]:
        inputs, buffers = arrays[:count_of_inputs], arrays[count_of_inputs:]
        bound = call._replace(inputs=dict(zip(call.inputs, inputs, strict=True)))
        past = cache._replace(store=dict(zip(keys, buffers, strict=True)))
        out, extended = evaluation.extend(bound, past, donate=False, keeping=keeping)
        kinds.update({key: extended.kinds[key] for key in extended.store})
        return (out, extended.length, *extended.store.values())

    arrays = (*call.inputs.values(), *cache.store.values())
    out, length, *buffers = _without(call, evaluated, arrays)
    return out, Cache(length, dict(zip(kinds, buffers, strict=True)), kinds)


def _without(call: BoundCall, function: Function, arrays: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`function(*arrays)`, and its gradient, computed with autocast off."""
    request = call.prepared.request
    is_plain = any(planned.runner.differentiable for planned in call.prepared.plan.calls)
    is_recorded = request.differentiated and not (request.transformed or request.mapped)
    if is_plain and is_recorded:
        return tuple(_WithoutAutocast.apply(function, *arrays))
    with off(arrays[0]):
        return function(*arrays)


class _WithoutAutocast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        inner = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad(), off(tensors[0]):
            outputs = function(*inner)
        # Under hooks the graph is recorded again in the gradient. If it were stored, a checkpoint
        # would compute everything again for each graph, which selective checkpointing refuses.
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.function, ctx.graph = function, None if is_hooked else (inner, outputs)
        ctx.save_for_backward(*tensors)
        results = tuple(output.detach() for output in outputs)
        recorded = zip(results, outputs, strict=True)
        ctx.mark_non_differentiable(*(r for r, output in recorded if not output.requires_grad))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: FunctionCtx, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        is_second, saved = torch.is_grad_enabled(), ctx.saved_tensors
        with off(saved[0]):
            if is_second or ctx.graph is None:
                with torch.enable_grad():
                    inner = [t.view_as(t) for t in saved]
                    outputs = ctx.function(*inner)
            else:
                inner, outputs = ctx.graph
            is_given = [cotangent is not None for cotangent in cotangents]
            differentiated = list(compress(outputs, is_given))
            wanted = [t for t in inner if t.requires_grad]
            d_outputs = list(compress(cotangents, is_given))
            options = {"retain_graph": True, "create_graph": is_second, "allow_unused": True}
            found = iter(torch.autograd.grad(differentiated, wanted, d_outputs, **options))
        return None, *(next(found) if t.requires_grad else None for t in inner)
