"""The judgements of JAX's own attention."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "jax/pallas_gpu_mha_reference",
        ("stability",),
        DEFECT,
        "A row whose largest logit is beyond about ±10⁹ can be NaN on a CPU. The logits are "
        "scaled, and softmax subtracts their maximum: XLA computes both by one multiply-add, "
        "which does not round the product, while the maximum is of rounded products. Their "
        "difference is above 88, and its exponential overflows. Which shapes are compiled so "
        "depends on XLA; not compiled, it is right. Logits of this size are rare.",
        code="""\
import jax
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import mha_reference

import precondattn as pa

q, k, v = (np.full((1, 2, 1, 1), x, "float32") for x in (1e12, -1, 1))  # all logits are equal
out = mha_reference(q, k, v, None, 0.3)
with jax.disable_jit():
    eager = mha_reference(q, k, v, None, 0.3)
expected = pa.softmax(*(x.astype(float) for x in (q, k, v)), scale=0.3, causal=False)
print("found:", np.ravel(out).tolist(), "not compiled:", np.ravel(eager).tolist())
print("expected:", expected.ravel().tolist())
""",
    ),
)
