"""Prints, as JSON, what calls ask of an absent GPU, eager and while a graph captures them.

PyTorch's device "meta" stands for the GPU: its tensors have no entries to read. Calls have b = 1,
h = n = 16 and d = e = 128, in bfloat16. A step extends a cache that is half full, whose length the
host knows, as in generation of text. This is a process of its own, without Triton's interpreter.
"""

import json
from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import precondattn as pa
from precondattn.cache.known_lengths import remembered
from precondattn.frameworks.torch import operators
from precondattn.frameworks.torch.framework import PyTorch
from precondattn_kernel_tools.triton_launches import recorded
from precondattn_triton.backend import Triton
from precondattn_triton.target import compiling_for

BACKENDS = ("triton", "torch")
FORWARD, BOTH, STEP = "forward", "forward and backward", "step"
CALLS = [
    *(("lucid", work, tokens) for tokens in (8192, 32768) for work in (FORWARD, BOTH)),
    *(
        (name, work, 8192)
        for name in ("laser", "gated_delta", "gla", "path", "ccq(gated_delta)")
        for work in (FORWARD, BOTH)
    ),
    *((name, STEP, 8192) for name in ("lucid", "path", "gated_delta")),
]
_OF_PATH = "lucid(path)", "lucid(path[flush=64])"
STEPS = [(name, STEP, 8192) for name in ("laser", "gla", "ccq(gated_delta)", *_OF_PATH)]


ON_HOST = "the call copies between the host and the device"


class LaunchingOperators(TorchDispatchMode):
    """Counts PyTorch's operators that launch a kernel: not views and allocations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "precondattn":  # On this device it would compute a shape alone.
            with self:
                return getattr(operators, function._opname)._init_fn(*args)
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            tensors = (x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            devices = {x.device for x in tensors} | {kwargs.get("device")} - {None}
            assert len({torch.device(each).type for each in devices}) == 1, ON_HOST
        aliases = (each.alias_info for each in function._schema.returns)
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        name = function._schema.name.partition("::")[2]
        if not is_view and "empty" not in name:
            self.counts[name] += 1
        return function(*args, **kwargs)


class NoNewData(TorchFunctionMode):
    """Refuses tensors of numbers of the host, of which `LaunchingOperators` is not told."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        if function in (torch.tensor, torch.as_tensor) and device is not None:
            assert torch.device(device).type != "meta", ON_HOST
        return function(*args, **(kwargs or {}))


class AttentionOnMeta(torch.autograd.Function):
    """In place of PyTorch's attention, whose kernels need a GPU."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, _):
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def counts_of(call):
    """The launches and the operators of the second time that a call is made."""
    with recorded() as launches, NoNewData(), LaunchingOperators() as mode:
        for _ in range(2):
            launches.clear()
            mode.counts.clear()
            call()
    return len(launches), dict(sorted(mode.counts.items()))


def inputs_of(name, tokens, device, **options):
    """Zeros, for this number of queries and of keys."""
    sizes = {"b": 1, "t": tokens, "s": tokens, **dict.fromkeys("hnu", 16), "d": 128, "e": 128}
    options |= {"dtype": torch.bfloat16, "device": device}
    patterns = pa.parse(name).inputs
    return {name: torch.zeros(p.shape(sizes), **options) for name, p in patterns.items()}


def ready(name, work, tokens, device):
    """A function that makes the call, with the same inputs each time; a step continues the last."""
    mechanism = pa.parse(name)
    x = inputs_of(name, 1 if work == STEP else tokens, device, requires_grad=work == BOTH)
    if work == STEP:
        empty, half = mechanism.init_cache(**x, capacity=tokens), tokens // 2
        length = remembered(torch.full_like(empty.length, half), half)
        caches = [empty._replace(length=length)]

    def call():
        if work == BOTH:
            out = mechanism(**x, backend=BACKENDS)
            torch.autograd.grad(out, [*x.values()], torch.empty_like(x["v"]))
            return
        with torch.no_grad():
            if work == FORWARD:
                mechanism(**x, backend=BACKENDS)
            else:
                caches[0] = mechanism.extend(caches[0], **x, backend=BACKENDS, donate=True)[1]

    return call


def captured():
    """A context in which calls behave as while a CUDA graph captures them."""
    return patch.object(PyTorch, "is_captured", lambda _, tensor: tensor.is_meta)


def masked(device):
    """The calls with masks on the device that a graph captures."""
    done = []
    with captured(), torch.no_grad(), recorded(), NoNewData(), LaunchingOperators():
        for name in ("lucid", "gated_delta", "laser", "path"):
            mechanism, x = pa.parse(name), inputs_of(name, 256, device)
            valid = torch.ones(1, 256, dtype=torch.bool, device=device)
            ids = torch.zeros(1, 256, dtype=torch.int32, device=device)
            for mask in ({"lengths": ids[:, 0]}, {"key_mask": valid}, {"segment_ids": ids}):
                mechanism(**x, **mask, backend=BACKENDS)
                done.append(f"{name} {next(iter(mask))}")
    return done


def main():
    found, device = {}, torch.device("meta")
    functional = torch.nn.functional
    with (
        patch.object(
            functional,
            "scaled_dot_product_attention",
            lambda *heads, **_: AttentionOnMeta.apply(*heads),
        ),
        patch.object(PyTorch, "is_traced", lambda self, tensor: self.is_captured(tensor)),
        patch.object(PyTorch, "has_only_a_shape", lambda *_: False),
        patch.object(PyTorch, "only_computes", lambda _: True),
        # The backend accepts tensors off the GPU, and calls read none of them.
        patch.object(Triton, "refuses_request", lambda *_: None),
        patch.object(PyTorch, "reads_at_once", False),
        compiling_for("sm_90"),
    ):
        for place, context in (("eager", nullcontext()), ("captured", captured())):
            with context:
                calls = [*CALLS, *(STEPS if place == "captured" else [])]
                found[place] = {
                    " ".join(map(str, call)): counts_of(ready(*call, device)) for call in calls
                }
        found["masked"] = masked(device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
