"""Prints, as JSON, the counts of `headline_calls`, eager and while a graph captures them.

It is a process of its own, because PyTorch then takes the absent device for the accelerator.
"""

import json
from contextlib import nullcontext

import torch

import precondattn as pa
from precondattn_kernel_tools.absent_device.absent_gpu import absent_gpu
from precondattn_kernel_tools.absent_device.call_counts import counts_of
from tests.kernel_tools.headline_calls import (
    CALLS,
    STEP,
    HeadlineCall,
    as_on_a_gpu,
    captured,
    inputs_of,
    ready,
)

_OF_PATH = "lucid(path)", "lucid(path[flush=64])"
STEPS = [HeadlineCall(name, STEP) for name in ("laser", "gla", "ccq(gated_delta)", *_OF_PATH)]


def main() -> None:
    found = {}
    with absent_gpu() as (device, launches), as_on_a_gpu():
        for place, context in (("eager", nullcontext), ("captured", captured)):
            with context():
                calls = [*CALLS, *(STEPS if place == "captured" else [])]
                found[place] = {c.name: counts_of(ready(c, device), launches)[:2] for c in calls}
        found["masked"] = masked(device)
        found["refused"] = refused(device)
    print(json.dumps(found))


def masked(device: torch.device) -> list[str]:
    """The calls with masks on the device that a graph captures."""
    done = []
    with captured(), torch.no_grad():
        for name in ("lucid", "gated_delta", "laser", "path"):
            mechanism, x = pa.parse(name), inputs_of(HeadlineCall(name, "forward"), 256, device)
            valid = torch.ones(1, 256, dtype=torch.bool, device=device)
            ids = torch.zeros(1, 256, dtype=torch.int32, device=device)
            for mask in ({"lengths": ids[:, 0]}, {"key_mask": valid}, {"segment_ids": ids}):
                mechanism(**x, **mask, backend=("triton", "torch"))
                done.append(f"{name} {next(iter(mask))}")
    return done


def refused(device: torch.device) -> list[str]:
    """What the absent device refuses, as a graph does."""
    zeros, errors = torch.zeros(3, device=device), []
    for does in (
        zeros.tolist,
        zeros.sum().item,
        zeros.cpu,
        zeros.nonzero,
        lambda: bool(zeros.any()),
        lambda: torch.tensor([1.0], device=device),
        lambda: zeros[zeros > 0],
        lambda: pa.lucid(**inputs_of(HeadlineCall("lucid", ""), 8, device), lengths=[3]),
    ):
        try:
            does()
        except (RuntimeError, NotImplementedError) as error:
            errors.append(str(error).splitlines()[0])
    return errors


if __name__ == "__main__":
    main()
