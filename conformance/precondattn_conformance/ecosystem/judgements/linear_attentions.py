"""The judgements of linear attention in several projects."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import CONVENTIONAL, LIMIT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "fast-transformers/recurrent_linear_attention performer/causal_linear_attention_noncuda",
        ("gradients",),
        LIMIT,
        "Sums over all tokens before are kept in the dtype of the inputs, which is "
        "bfloat16 here: 8 bits of a long sum. In float32 and float64, gradients are "
        "right.",
    ),
    Judgement(
        "lolcats/quadratic_attention",
        ("stability",),
        LIMIT,
        "In bfloat16, features of keys are summed in bfloat16: `fp32_attention=True` "
        "asks for more.",
    ),
    Judgement(
        "fast-transformers/full_attention xformers/ref_attention",
        ("gradients", "padding"),
        CONVENTIONAL,
        "A row that sees no key is NaN, as its masks are −∞ and are added: what a "
        "softmax of nothing is, is a matter of convention. The NaN reaches the "
        "gradients of other rows.",
    ),
)
