"""The judgements of ejKernel."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "ejkernel/recurrent",
        ("gradients", "future", "stability", "order_of_calls"),
        DEFECT,
        "The gradient by keys is wrong: the derivative that the function has itself "
        "multiplies the gradient of the state with values over the axis of keys. "
        "Outputs, and the gradients by queries and values, are right.",
        code="""\
import jax
import numpy as np
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

q, k, v = np.random.default_rng(0).normal(size=(3, 1, 3, 1, 2)).astype("float32")
run = peer_named("ejkernel/recurrent").function
found = jax.grad(lambda *x: run(*x, 1.0).sum(), (0, 1, 2))(q, k, v)

of64 = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
expected = torch.autograd.grad(pa.linear(*of64, scale=1.0).sum(), of64)
for name, x, y in zip("qkv", found, expected, strict=True):
    error = np.abs(np.asarray(x) - y.numpy()).max() / y.abs().max()
    print(f"gradient of {name}: {error:.1e}")
""",
    ),
)
