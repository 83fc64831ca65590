"""The judgements of nystrom-attention."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import CONVENTIONAL, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "nystrom_attention/nystrom_attention",
        ("outputs", "gradients", "padding"),
        CONVENTIONAL,
        "The iteration for the inverse begins with the largest sums of all landmarks, "
        "masked ones included, and ours with those of visible ones. After its 6 steps "
        "this is seen; after 30, both are the same to rounding.",
    ),
)
