"""What the cases on a CPU should cost beside their peers, and why those that miss it do.

`make_performance.py` sets the measured ratios beside these.
"""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """A ratio to a peer that is wanted."""

    case: str
    peer: str
    before: str
    """Ratios of earlier versions, on two threads"""
    wanted: float
    missed: str
    """Why the ratio is above `wanted`, where it is"""


LIMITS = (
    Limit("lucid", "sdpa", "2.58–2.64", 2.3, ""),
    Limit("lucid_one_kv_head", "sdpa", "1.22–1.24", 1.18, ""),
    Limit("lucid_backward", "sdpa", "2.50–2.70", 2.3, ""),
    Limit("laser", "sdpa", "1.06", 1.04, ""),
    Limit("laser_backward", "sdpa", "1.08", 1.04, ""),
    Limit("gated_delta", "transformers", "0.35–0.50", 0.25, ""),
    Limit("gated_delta_backward", "transformers", "0.25", 0.18, ""),
    Limit("ccq_gated_delta", "base", "1.83–1.88", 1.6, ""),
    Limit("path", "sdpa", "2.07", 1.9, ""),
    Limit("window_backward", "masked_sdpa", "0.3", 0.4, ""),
    Limit("jax_softmax", "sdpa", "1.5–2.2", 1.2, ""),
    Limit("jax_softmax", "xla", "0.42", 0.3, ""),
    Limit("jax_lucid", "sdpa", "4.19", 3.0, ""),
    Limit("jax_lucid_backward", "sdpa", "3.47", 2.8, ""),
    Limit("numpy_lucid", "base", "1.95", 1.9, ""),
    Limit("packed_lucid", "batch", "17", 1.3, ""),
    Limit("lucid_decode", "sdpa", "1.32", 1.1, ""),
    Limit("transformers_mamba2_backward", "transformers", "0.81–0.93", 0.5, ""),
    Limit("deltaformer", "sdpa", "2.68", 2.2, ""),
    Limit("atk_gated_delta", "base", "1.41", 1.15, ""),
    Limit("atk_kda", "base", "1.23", 1.15, ""),
)
