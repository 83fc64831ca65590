"""The wanted ratios of the cases on a CPU to their peers, and the reasons for missed ones.

`make_performance.py` prints the measured ratios next to these.
"""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """The wanted ratio of a case to its peer."""

    case: str
    peer: str
    before: str
    """Ratios of earlier versions, on two threads"""
    wanted: float
    missed: str
    """The reason if the measured ratio is above `wanted`"""


LIMITS = (
    Limit("lucid", "sdpa", "2.58–2.64", 2.3, ""),
    Limit("lucid_one_kv_head", "sdpa", "1.22–1.24", 1.18, ""),
    Limit("lucid_backward", "sdpa", "2.50–2.70", 2.3, ""),
    Limit(
        "laser",
        "sdpa",
        "1.06",
        1.04,
        "Attention itself is SDPA. The additional time is spent on passes over values and output: "
        "two maxima, a minimum, an exponential, a logarithm and a sum, each over 8 MiB.",
    ),
    Limit("laser_backward", "sdpa", "1.08", 1.04, ""),
    Limit(
        "gated_delta",
        "transformers",
        "0.35–0.50",
        0.25,
        "An earlier version took 109 ms and the peer 218 ms; this one takes 76 ms and the peer "
        "143 ms. Matrix products take 62 % of the time. They are 336 calls on chunks, at 0.6 of "
        "the rate of a large product. Copies to and from chunks take 14 %, and factors of decays "
        "10 %. "
        "At the rate of a large product, the FLOPs would take 28 ms.",
    ),
    Limit(
        "gated_delta_backward",
        "transformers",
        "0.25",
        0.18,
        "The reason is that of the forward pass. An earlier version took 389 ms; this one takes "
        "267 ms.",
    ),
    Limit(
        "ccq_gated_delta",
        "base",
        "1.83–1.88",
        1.6,
        "The covariance of the keys is a second state of d × d numbers, with its own products for "
        "each chunk. Products take 55 % of the time, and copies 17 %. Keys in chunks and decays, "
        "which both recurrences need, are computed twice.",
    ),
    Limit("path", "sdpa", "2.07", 1.9, ""),
    Limit("window_backward", "masked_sdpa", "0.3", 0.4, ""),
    Limit(
        "jax_softmax",
        "sdpa",
        "1.5–2.2",
        1.2,
        "Inside a loop, XLA computes the products and exponentials of a block one after the other, "
        "so a second core helps little. On one thread the ratio is 1.2.",
    ),
    Limit("jax_softmax", "xla", "0.42", 0.3, "The reason is that of the row above."),
    Limit(
        "jax_lucid",
        "sdpa",
        "4.19",
        3.0,
        "LUCID takes 2.1 times as long as our softmax attention on JAX, as its FLOPs predict. That "
        "softmax attention takes 1.99 times as long as SDPA. On one thread the ratio is 2.5.",
    ),
    Limit(
        "jax_lucid_backward",
        "sdpa",
        "3.47",
        2.8,
        "The reason is that of the forward pass. On one thread the ratio is 2.6.",
    ),
    Limit("numpy_lucid", "base", "1.95", 1.9, ""),
    Limit("numpy_softmax", "sdpa", "–", 1.8, ""),
    Limit("packed_lucid", "batch", "17", 1.3, ""),
    Limit(
        "lucid_decode",
        "sdpa",
        "1.32",
        1.1,
        "Before a token attends, LUCID has to compute its y, which reads all keys and solved "
        "values once more. Both steps are limited by the memory bandwidth.",
    ),
    Limit(
        "ssd",
        "naive_fla",
        "0.80",
        0.6,
        "Matrix products take half of the time. They run at 0.6 of the rate of a large product, "
        "because the factors of a chunk are read from memory. Decays within a chunk take a sixth "
        "of the time: we sum only the gates between two tokens, while the peer subtracts "
        "cumulative sums, which loses accuracy with strong gates. Copies to and from chunks take "
        "an eighth, as in the peer.",
    ),
    Limit("deltaformer", "sdpa", "2.68", 2.2, ""),
    Limit(
        "atk_gated_delta",
        "base",
        "1.41",
        1.15,
        "On one thread, a logarithm and a power for every entry of the key take 6 of 118 ms. The "
        "array A, with a product for each 16 tokens, and the passes over it take another 11 ms. "
        "Five runs on two threads had the ratios 1.04, 1.15, 1.17, 1.23 and 1.24.",
    ),
    Limit("atk_kda", "base", "1.23", 1.15, ""),
)
