"""The options that softmax attention adds to plain attention, and the residuals of its kernels.

Kernels must compare every option, so that none is ignored. New options belong in this list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from precondattn.backend import ArraySpec
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


def logs_and_unrounded(inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
    """λ (b, h, t), and, if the output is rounded to half precision, the output in float32."""
    b, t, h, _ = inputs["q"].shape
    (*_, e), dtype = inputs["v"]
    logs = ArraySpec((b, h, t), "float32")
    return (logs,) if dtype == "float32" else (logs, ArraySpec((b, t, h, e), "float32"))
