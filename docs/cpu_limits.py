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
    Limit(
        "laser",
        "sdpa",
        "1.06",
        1.04,
        "Attention itself is SDPA. The rest is passes over values and output: two maxima and a "
        "minimum, an exponential, a logarithm and a sum of 8 MiB each.",
    ),
    Limit("laser_backward", "sdpa", "1.08", 1.04, ""),
    Limit(
        "gated_delta",
        "transformers",
        "0.35–0.50",
        0.25,
        "It took 109 ms beside 218 of the peer, and takes 76 beside 143. 62 % is products, in 336 "
        "calls on chunks, at 0.6 of the rate of a large one; 14 % is copies to and from chunks, "
        "10 % factors of decays. At the rate of a large product its FLOPs would take 28 ms.",
    ),
    Limit(
        "gated_delta_backward",
        "transformers",
        "0.25",
        0.18,
        "As forward; it took 389 ms, and takes 267.",
    ),
    Limit(
        "ccq_gated_delta",
        "base",
        "1.83–1.88",
        1.6,
        "The covariance of the keys is a second state of d × d numbers, with its own products for "
        "each chunk (products are 55 % of the time, copies 17 %). What the two recurrences have in "
        "common, keys in chunks and decays, is made twice.",
    ),
    Limit("path", "sdpa", "2.07", 1.9, ""),
    Limit("window_backward", "masked_sdpa", "0.3", 0.4, ""),
    Limit(
        "jax_softmax",
        "sdpa",
        "1.5–2.2",
        1.2,
        "Inside a loop XLA computes each product of a block and each exponential as one call, one "
        "after the other; on one thread the ratio is 1.2, so that the second core gains little.",
    ),
    Limit("jax_softmax", "xla", "0.42", 0.3, "As above."),
    Limit(
        "jax_lucid",
        "sdpa",
        "4.19",
        3.0,
        "It is 2.1 times JAX's own softmax attention, as the FLOPs say; that is 1.99 times SDPA. "
        "On one thread the ratio is 2.5.",
    ),
    Limit("jax_lucid_backward", "sdpa", "3.47", 2.8, "As forward; on one thread the ratio is 2.6."),
    Limit("numpy_lucid", "base", "1.95", 1.9, ""),
    Limit("numpy_softmax", "sdpa", "–", 1.8, ""),
    Limit("packed_lucid", "batch", "17", 1.3, ""),
    Limit(
        "lucid_decode",
        "sdpa",
        "1.32",
        1.1,
        "A token solves for its own y before it attends, which needs as many products with keys "
        "and solved values again; both are bound by the memory that these are read from.",
    ),
    Limit(
        "ssd",
        "naive_fla",
        "0.80",
        0.6,
        "Products are half of the time, and run at 0.6 of the rate of a large one: the factors of "
        "a chunk are read from memory. Decays between the tokens of a chunk are sums of their own "
        "gates only (a sixth), where the peer subtracts sums, to which strong gates cost accuracy. "
        "Copies to and from chunks are an eighth, in both.",
    ),
    Limit(
        "transformers_mamba2_backward",
        "transformers",
        "0.81–0.93",
        0.5,
        "Projections, convolution and norms are those of Transformers in both.",
    ),
    Limit("deltaformer", "sdpa", "2.68", 2.2, ""),
    Limit(
        "atk_gated_delta",
        "base",
        "1.41",
        1.15,
        "A logarithm and a power for every entry of the key are 6 ms of 118 on one thread; A, a "
        "product for each 16 tokens, and the passes between them are another 11. Five runs on two "
        "threads had 1.04, 1.15, 1.17, 1.23 and 1.24.",
    ),
    Limit("atk_kda", "base", "1.23", 1.15, ""),
)
