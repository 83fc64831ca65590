"""Mechanisms that stand for all others in tests of what the library does with any mechanism.

The conformance suite runs its checks on every mechanism. These are for tests of the core about
arguments, masks, caches or autograd: each leaf with mathematics of its own, each form of the
recurrence, each kind of step of a preconditioner, and each option that chooses another algorithm.
`tests/core/test_source.py` asserts that no class is left out.
"""

import precondattn as pa

REPRESENTATIVES = (
    # Softmax attention, and the options that change its scores, its mask or its read.
    "softmax",  # What PyTorch and JAX have fused kernels for.
    "softmax[causal=false]",  # Full calls only: there is no cache.
    "softmax[window=3]",  # A cache of the last tokens.
    "softmax[bias=true]",  # An input of pairs of query and key.
    "softmax[forget=unscaled]",  # A decay between query and key.
    "softmax[softcap=2]",
    "softmax[sink=true]",
    "softmax[distance=slopes]",  # A bias of positions.
    "path",
    "path[forget=scaled,flush=3]",  # Scores along products of reflections; rewritten cached rows.
    "deltaformer",  # A triangular solve with softmax weights.
    "channel[scale_by=tokens]",  # Attention between channels.
    "cross_covariance",  # The same, of channels of length 1.
    "nystrom[landmarks=5,skip=true]",  # An iterated inverse, through means of segments.
    "outlook[stride=2,grid=5]",  # Logits in place of queries and keys; windows that overlap.
    "windowed[size=3,shift=1,scale=0.3]",  # Windows of a grid.
    # Recurrences, by what decays and what is written.
    "elu1(linear[normalize=true])",  # No decay; a second state, of the normalisation; features.
    "retention",  # A fixed decay.
    "gla",  # A decay for each channel.
    "rwkv6",  # A read of the state before the token.
    "hgrn2",  # Keys of the gate.
    "gsa",  # Two states, one after the other.
    "mlstm",  # A normalised state relative to a running maximum, which is −∞ at first.
    "qk_norm[norm=l2](delta)",  # The delta rule; rows of length 1.
    "gated_delta",  # The delta rule with a decay for each head.
    "kda",  # The delta rule with a decay for each channel.
    "gdn2",  # Strengths to erase and to write, for each channel.
    "comba",  # Another key to erase than to write.
    "dplr",  # Any diagonal plus low rank.
    "delta_product",  # Several steps for each token.
    # Preconditioners of keys that are written.
    "atk[learned=true](delta)",
    "atk",
    "atk(kda)",
    "atk(gdn2)",
    "stable_step[rule=exact]",  # A strength that depends on the key.
    "stable_step(gdn2)",
    # Preconditioners of values.
    "lucid[beta=true]",  # A solve with a unit diagonal.
    "lucid[normalize=rows]",  # A solve with another diagonal.
    # A symmetric solve.
    "lucid[normalize=queries_and_keys,rho=0.1](softmax[causal=false,bias=true])",
    "lucid(path[flush=3])",  # A solve with the base's own metric.
    "lucid(laser)",  # Two of them; the read is a log-mean-exp.
    # Preconditioners of queries.
    "mesa",  # A solve with a state, before SSD.
    "ccq",  # A product with a state.
    "ccq[covariance=query_weighted](linear)",  # A product with a state that queries weight.
    # Preconditioners of rows and of outputs.
    "differential[per=token]",  # Two calls of the base.
    "bidirectional(gated_delta)",  # Two calls too, one of reversed tokens; no cache of its states.
    "row_normalized",
    "temperature[per=head]",
    "per_dim_scale",
    "qk_norm[norm=layer,gain=true]",
    "hedgehog",
    # The only piece that no step of a preconditioner calls.
    "contraction_gate",
)


def _is_scanned(cls: type[pa.Mechanism]) -> bool:
    recurrence = cls().recurrence
    is_ours = cls.role == "base" and cls.__module__.startswith("precondattn.")
    return is_ours and recurrence is not None and recurrence.normaliser != "running maximum"


CALLED = tuple(text for text in REPRESENTATIVES if pa.parse(text).role != "piece")
"""Those that are whole mechanisms."""
SCANNED = (
    *(name for name, cls in pa.mechanisms().items() if _is_scanned(cls)),
    *("linear[normalize=true]", "ccq(gla)", "ccq(gated_delta)", "ccq(retention)", "mesa(ssd)"),
    *("atk(gated_delta)", "atk[learned=true](kda)"),
)
"""All recurrences whose states before each device are scanned, and mechanisms with several."""
CACHED = tuple(text for text in CALLED if pa.parse(text).offers.causal)
"""Those with a cache."""
