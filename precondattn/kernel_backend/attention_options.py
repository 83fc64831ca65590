"""The options that softmax attention adds to plain attention, which some kernels decline.

Kernels must compare every option, so that none is ignored. New options belong in this list.
"""

from __future__ import annotations

from collections.abc import Collection

from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn.spec.softmax import SoftmaxAttention

BIAS, SOFTCAP, SINK, SLOPES = "a bias", "a soft cap", "a sink", "slopes of distances"


def declined_option(
    leaf: SoftmaxAttention, kernels: str, supported: Collection[str] = ()
) -> str | None:
    """The reason why kernels decline `leaf`, a `Softmax` or `Path`; or None."""
    is_used = {
        BIAS: leaf.bias,
        "a forget gate": leaf.forget != "none",
        SOFTCAP: leaf.softcap is not None,
        SINK: leaf.sink,
        SLOPES: leaf.distance == "slopes",
        "buckets of distances": leaf.distance == "buckets",
        "the logarithms of its sums": leaf.read == MEAN_AND_LOG_SUM,
    }
    declined = (option for option in is_used if is_used[option] and option not in supported)
    return next((f"has no kernel for {kernels} with {option}" for option in declined), None)
