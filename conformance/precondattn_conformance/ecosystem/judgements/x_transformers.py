"""The judgements of x-transformers."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import CONVENTIONAL, DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "x_transformers/attend_causal",
        ("outputs", "gradients"),
        DEFECT,
        "With `causal=True` and a mask, a query whose visible keys are all masked "
        "returns the mean of all values, later ones too: whether a row is wholly masked "
        "is asked before causality is applied. With `flash=True`, such a row is 0.",
        code="""\
import torch
from x_transformers.attend import Attend

import precondattn as pa

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 3, 4)
mask = torch.tensor([[False, True, True]])  # the first query sees no key
later = v.clone()
later[..., 2, :] += 10

tokens_first = (x.transpose(1, 2).double() for x in (q, k, v))
expected = pa.softmax(*tokens_first, key_mask=mask).transpose(1, 2)
for flash in (False, True):
    attend = Attend(causal=True, flash=flash)
    out, changed = (attend(q, k, x, mask=mask)[0][0, 0, 0] for x in (v, later))
    print(
        f"flash={flash}: first row off by {(out - expected[0, 0, 0]).abs().max():.2f}; "
        f"by another last value it changes by {(changed - out).abs().max():.2f}"
    )
""",
    ),
    Judgement(
        "x_transformers/attend_grouped",
        ("outputs", "gradients"),
        CONVENTIONAL,
        "Of h query heads and n key heads, query head i reads key head i mod n, and not "
        "⌊i n / h⌋ as in the paper of grouped-query attention.",
        code="""\
import torch
from x_transformers.attend import Attend

import precondattn as pa

torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
found = Attend(causal=True)(q, k, v)[0]


def error(k, v):
    expected = pa.softmax(*(x.transpose(1, 2).double() for x in (q, k, v))).transpose(1, 2)
    return (found - expected).abs().max() / expected.abs().max()


twice = [x.repeat(1, 2, 1, 1) for x in (k, v)]
print(f"query heads 0 and 1 read key head 0: {error(k, v):.1e}")
print(f"query heads 0 and 2 read key head 0: {error(*twice):.1e}")
""",
    ),
)
