"""The judgements of timm."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "timm/attention timm/diff_attention",
        ("gradients", "padding"),
        DEFECT,
        "With `fused_attn=False`, a row that sees no key is NaN, and so are gradients "
        "of the other rows of its sequence, as 0 times NaN is NaN. With "
        "`fused_attn=True` the row is 0, and gradients are right. The platform and an "
        "environment variable tell which of them runs.",
        code="""\
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 1, 4)
visible = torch.tensor([[[[False, False], [False, True]]]])  # the first token sees nothing
expected = pa.softmax(q.double(), k.double(), v.double(), key_mask=visible[:, 0, 1])
for name in ("timm/attention", "timm/attention_fused"):
    key = k.clone().requires_grad_()
    out = peer_named(name).function(q, key, v, visible)
    (gradient,) = torch.autograd.grad(out[:, 1].sum(), key)
    print(name, "output:", (out - expected).abs().amax((0, 2, 3)).tolist())
    print("  gradient by k of the second row:", gradient.flatten(2).sum(-1).tolist())
""",
    ),
)
