"""What calls of mechanisms by the default backends ask of an accelerator, counted without one.

`python -m tests.kernel_tools.launches_on_absent_gpu` prints what is saved in
`docs/measurements/launches/torch.json`: the operators of PyTorch that launch a kernel, and the most
bytes of arrays that exist at once beyond the arguments, for one sequence, 16 heads of width 128, in
bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MECHANISMS = (
    *("lucid", "path", "deltaformer", "nystrom"),
    *("linear", "retention", "ssd", "mlstm", "gla", "hgrn2", "rwkv6", "gsa"),
    *("delta", "gated_delta", "delta_product", "comba", "kda", "gdn2", "dplr", "ccq(gated_delta)"),
)
TOKENS = (8192, 32768)
SIZES = {**dict.fromkeys("hnu", 16), "d": 128, "e": 128, "m": 64, "b": 1}


def launches(mechanisms: Iterable[str], tokens: Iterable[int]) -> dict[str, list[list[int]]]:
    """(operators, bytes) of a forward pass, and of it with its gradient, for each length in turn.

    It has to run in a process without Triton's interpreter.
    """
    from precondattn_kernel_tools.absent_device.absent_gpu import absent_gpu
    from precondattn_kernel_tools.absent_device.call_counts import counts_of

    found: dict[str, list[list[int]]] = {name: [] for name in mechanisms}
    with absent_gpu() as (device, kernels):
        for name, count, gradient in product(found, tokens, (False, True)):
            counts = counts_of(_call(name, count, device, gradient=gradient), kernels)
            total = counts.launches + sum(counts.operators.values())
            found[name].append([total, counts.live_bytes])
    return found


def inputs_of(
    name: str, tokens: int, device: torch.device, *, requires_grad: bool = False
) -> dict[str, torch.Tensor]:
    """Zeros, for this number of queries and of keys."""
    import torch

    import precondattn as pa

    sizes = {**SIZES, "t": tokens, "s": tokens}
    options = {"dtype": torch.bfloat16, "device": device, "requires_grad": requires_grad}
    return {key: torch.zeros(p.shape(sizes), **options) for key, p in pa.parse(name).inputs.items()}


def _call(name: str, tokens: int, device: torch.device, *, gradient: bool) -> Callable[[], None]:
    """A function that calls a mechanism, with the same inputs each time."""
    import torch

    import precondattn as pa

    mechanism, x = pa.parse(name), inputs_of(name, tokens, device, requires_grad=gradient)

    def call() -> None:
        out = mechanism(**x)
        if gradient:
            torch.autograd.grad(out, [*x.values()], torch.empty_like(out))

    return call


if __name__ == "__main__":
    rows = (f' "{name}": {json.dumps(row)}' for name, row in launches(MECHANISMS, TOKENS).items())
    print("{\n" + ",\n".join(rows) + "\n}")
