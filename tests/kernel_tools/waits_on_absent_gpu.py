"""Prints, as JSON, the calls of base mechanisms that wait for an absent GPU, and why.

A process of its own, because PyTorch then takes the absent device for the accelerator.
"""

import json
import sys

import torch

import precondattn as pa
from precondattn.cache.known_lengths import remembered
from precondattn_kernel_tools.absent_device.absent_gpu import absent_gpu
from precondattn_kernel_tools.absent_device.call_counts import counts_of

NOT_CAUSAL = ("channel", "cross_covariance", "nystrom", "outlook", "windowed")
B, T = 2, 256
SIZES = {"b": B, "t": T, "s": T, **dict.fromkeys("hnu", 4), "d": 16, "e": 16, "m": 8}


def masks_on(device):
    of_tokens = {"dtype": torch.int32, "device": device}
    return {
        "no mask": {},
        "lengths": {"lengths": torch.zeros(B, **of_tokens)},
        "segment_ids": {"segment_ids": torch.zeros(B, T, **of_tokens)},
        "key_mask": {"key_mask": torch.zeros(B, T, dtype=torch.bool, device=device)},
    }


def calls(mechanism, device):
    """Each call, by name: in training with each mask, and a step of decoding."""
    options = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    x = {name: torch.zeros(p.shape(SIZES), **options) for name, p in mechanism.inputs.items()}
    for name, masks in masks_on(device).items():

        def call(masks=masks):
            out = mechanism(**x, **masks)
            torch.autograd.grad(out, [*x.values()], torch.empty_like(out))

        yield name, call
    if mechanism._name in NOT_CAUSAL:
        return
    parts = mechanism.inputs.items()
    one = {n: x[n].detach()[:, :1] if p.time_axis == 1 else x[n].detach() for n, p in parts}
    empty = mechanism.init_cache(**one, capacity=T)
    cache = empty._replace(length=remembered(torch.full_like(empty.length, T // 2), T // 2))

    def step():
        with torch.no_grad():
            mechanism.extend(cache, **one)

    yield "step", step


if __name__ == "__main__":
    waits = {}
    with absent_gpu() as (device, launches):
        for name in sys.argv[1:] or [n for n, c in pa.mechanisms().items() if c.role == "base"]:
            for work, call in calls(pa.parse(name), device):
                try:
                    counts_of(call, launches)
                except RuntimeError as error:
                    waits[f"{name}, {work}"] = str(error)
    print(json.dumps(waits))
