"""Prints, as JSON, what calls ask of an absent GPU, eager and while a graph captures them.

Calls have b = 1, h = n = 16 and d = e = 128, in bfloat16. A step extends a cache that is half full,
whose length the host knows, as in generation of text. This is a process of its own, because PyTorch
then takes the absent device for the accelerator.
"""

import json
from contextlib import nullcontext
from unittest.mock import patch

import torch

import precondattn as pa
from precondattn.cache.known_lengths import remembered
from precondattn.frameworks.torch.framework import PyTorch
from precondattn_kernel_tools.absent_device import NAME
from precondattn_kernel_tools.absent_device.absent_gpu import absent_gpu
from precondattn_kernel_tools.absent_device.call_counts import counts_of
from precondattn_triton.backend import Triton
from precondattn_triton.target import compiling_for
from tests.kernel_tools.launches_on_absent_gpu import inputs_of

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
    return patch.object(PyTorch, "is_captured", lambda _, tensor: str(tensor.device.type) == NAME)


def masked(device):
    """The calls with masks on the device that a graph captures."""
    done = []
    with captured(), torch.no_grad():
        for name in ("lucid", "gated_delta", "laser", "path"):
            mechanism, x = pa.parse(name), inputs_of(name, 256, device)
            valid = torch.ones(1, 256, dtype=torch.bool, device=device)
            ids = torch.zeros(1, 256, dtype=torch.int32, device=device)
            for mask in ({"lengths": ids[:, 0]}, {"key_mask": valid}, {"segment_ids": ids}):
                mechanism(**x, **mask, backend=BACKENDS)
                done.append(f"{name} {next(iter(mask))}")
    return done


def main():
    found = {}
    with (
        absent_gpu() as (device, launches),
        # The backend accepts tensors off the GPU, and calls read none of them.
        patch.object(Triton, "refuses_request", lambda *_: None),
        patch.object(PyTorch, "reads_at_once", False),
        compiling_for("sm_90"),
    ):
        for place, context in (("eager", nullcontext()), ("captured", captured())):
            with context:
                calls = [*CALLS, *(STEPS if place == "captured" else [])]
                found[place] = {
                    " ".join(map(str, call)): counts_of(ready(*call, device), launches)[:2]
                    for call in calls
                }
        found["masked"] = masked(device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
