"""The judgements of PyTorch."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import LIMIT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "pytorch/sdpa_is_causal",
        ("outputs",),
        LIMIT,
        "With `is_causal=True` and fewer queries than keys, the first query is aligned with the "
        'first key. Its documentation says so ("upper left causal bias"); `causal_lower_right` '
        "aligns the last with the last.",
        code="""\
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import precondattn as pa

torch.manual_seed(0)
q, k, v = torch.randn(1, 1, 2, 8), *torch.randn(2, 1, 1, 16, 8)  # 2 queries, 16 keys

expected = pa.softmax(*(x.double().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
for name, mask in {
    "is_causal": dict(is_causal=True),
    "causal_lower_right": dict(attn_mask=causal_lower_right(2, 16)),
}.items():
    error = (scaled_dot_product_attention(q, k, v, **mask) - expected).abs().max()
    print(f"{name}: {error / expected.abs().max():.1e}")
""",
    ),
)
