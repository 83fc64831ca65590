"""The options that softmax attention adds to plain attention, which some kernels decline.

Kernels must compare every option, so that none is ignored. New options belong in this list.
"""

from __future__ import annotations

from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn.spec.softmax import SoftmaxAttention


def declined_option(leaf: SoftmaxAttention, kernels: str) -> str | None:
    """The reason why kernels for plain attention decline `leaf`, a `Softmax` or `Path`; or None."""
    is_used = {
        "a bias": leaf.bias,
        "a forget gate": leaf.forget != "none",
        "a soft cap": leaf.softcap is not None,
        "a sink": leaf.sink,
        "slopes or buckets of distances": leaf.distance != "none",
        "the logarithms of its sums": leaf.read == MEAN_AND_LOG_SUM,
    }
    used = [f"has no kernel for {kernels} with {option}" for option in is_used if is_used[option]]
    return used[0] if used else None
