"""The judgements of attention in chunks with a running maximum."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, LIMIT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "memory-efficient-attention/efficient_attention_torch_in_chunks",
        ("outputs", "threads"),
        DEFECT,
        "Keys count twice where their number is no multiple of `key_chunk_size`: the "
        "last chunk is moved back so that it is whole, and overlaps the one before it. "
        "With the default, 4096, this needs more than 4096 keys.",
        code="""\
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 17, 1, 1), torch.zeros(1, 17, 1, 1)
v[0, 1] = 17
visible = torch.ones(1, 1, 1, 17, dtype=torch.bool)
run = peer_named("memory-efficient-attention/efficient_attention_torch_in_chunks").function
expected = pa.softmax(q.double(), k.double(), v.double())
print("17 keys in chunks of 16:", run(q, k, v, visible).item(), "expected:", expected.item())
""",
    ),
    Judgement(
        "memory-efficient-attention/efficient_attention_torch",
        ("outputs",),
        DEFECT,
        "Where there are more queries than `query_chunk_size` (1024), and they are no "
        "multiple of it, the output has more rows than there are queries: its docstring "
        "says `[batch..., q_length, num_heads, v_depth_per_head]`. The rows after the "
        "first chunk are those of other queries.",
        code="""\
import torch

from precondattn_conformance.peers.everyone import peer_named

q = k = v = torch.zeros(1, 1025, 1, 1)
visible = torch.ones(1, 1, 1025, 1025, dtype=torch.bool)
run = peer_named("memory-efficient-attention/efficient_attention_torch").function
print("1025 queries, rows of the output:", run(q, k, v, visible).shape[1])
""",
    ),
    Judgement(
        "memory-efficient-attention-pytorch/cosine_sim_flash_attention",
        (
            "outputs",
            "gradients",
            "future",
            "stability",
            "dtypes",
            "determinism",
            "order_of_calls",
            "strides",
        ),
        DEFECT,
        "The sum of the weights of a block is taken as at least 1e-6, but a weight is e "
        "to the power of 16 (cos − 1), which is less than that for orthogonal vectors: "
        "such rows come out too small.",
        code="""\
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

q = torch.tensor([[[[1.0, 0]]]])  # one token, so that its weight is 1
k = torch.tensor([[[[0.0, 1]]]])
v = torch.ones(1, 1, 1, 2)
run = peer_named("memory-efficient-attention-pytorch/cosine_sim_flash_attention").function
expected = pa.softmax(q.double(), k.double(), v.double(), scale=16.0)
print("found:", run(q, k, v).flatten().tolist(), "expected:", expected.flatten().tolist())
""",
    ),
    Judgement(
        "memory-efficient-attention-pytorch/memory_efficient_attention "
        "memory-efficient-attention-pytorch/flash_attention",
        ("outputs",),
        DEFECT,
        "With fewer queries than keys, causal queries see other keys than in "
        "`attention` of the same project, which aligns the last query with the last "
        "key, as our definition does. `memory_efficient_attention` aligns the first "
        "ones; `flash_attention` subtracts the difference of the lengths where it has "
        "to be added. A flag of one layer switches between `attention` and "
        "`memory_efficient_attention`.",
        code="""\
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

q, k, v = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 1), torch.tensor([[[[0.0], [1], [5]]]])
expected = pa.softmax(*(x.transpose(1, 2).double() for x in (q, k, v))).transpose(1, 2)
print("expected:", expected.flatten().tolist())
for name in ("attention", "memory_efficient_attention", "flash_attention"):
    run = peer_named(f"memory-efficient-attention-pytorch/{name}").function
    print(f"{name}(causal=True):", run(q, k, v, True).flatten().tolist())
""",
    ),
    Judgement(
        "flash-attention-jax/causal_flash_attention flash-attention-jax/masked_flash_attention",
        ("stability",),
        DEFECT,
        "The running maximum begins with −1e6, so that a row whose logits are all far "
        "below it has no weights, and is NaN or 0. Logits of this size are rare.",
        code="""\
import numpy as np

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

q, k, v = (np.full((1, 1, 1, 1), x, "float32") for x in (2e6, -1, 1))  # one token, logit −2e6
mask = np.ones((1, 1), bool)
for name, more in (("causal_flash_attention", ()), ("masked_flash_attention", (False, mask))):
    out = peer_named(f"flash-attention-jax/{name}").function(q, k, v, *more)
    print(f"{name}: {out.item()}")
print("expected:", pa.softmax(*(x.astype(float) for x in (q, k, v))).item())
""",
    ),
    Judgement(
        "flash-attention-jax/causal_attention",
        ("stability",),
        DEFECT,
        "Hidden logits are −1e10, so that a row whose visible logits are below it reads "
        "the future. Logits of this size are rare.",
        code="""\
import numpy as np

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

q, k = np.full((1, 1, 2, 1), 2e5, "float32"), np.full((1, 1, 2, 1), -1e5, "float32")
v = np.array([1, 5], "float32").reshape(1, 1, 2, 1)
out = peer_named("flash-attention-jax/causal_attention").function(q, k, v)
expected = pa.softmax(*(np.moveaxis(x, 1, 2).astype(float) for x in (q, k, v)))
print("found:", np.ravel(out).tolist(), "expected:", np.ravel(expected).tolist())
""",
    ),
    Judgement(
        "memory-efficient-attention/efficient_attention_jax",
        ("gradients",),
        LIMIT,
        "In bfloat16 all of it is in bfloat16, also weights, their sums and quotients. The "
        "gradient of a query is a sum of keys whose weights cancel, so that rounding brings back "
        "what keys have in common. Outputs are right, and so is float32; its other red cases have "
        "rows that see no key, a convention below.",
        code="""\
import jax
import jax.numpy as jnp

from precondattn_conformance.peers.everyone import peer_named

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 1, 8))
k = k + 5  # this changes no weight, as it is the same for all keys
visible = jnp.ones((1, 1, 64, 64), bool)
run = peer_named("memory-efficient-attention/efficient_attention_jax").function
attend = jax.nn.dot_product_attention  # its softmax is in float32


def gradient(function, dtype, *more):
    x, y, z = (each.astype(dtype) for each in (q, k, v))
    return jax.grad(lambda x: function(x, y, z, *more).astype(jnp.float32).sum())(x)


expected = gradient(attend, jnp.float32)
for name, found in (
    ("float32", gradient(run, jnp.float32, visible)),
    ("bfloat16", gradient(run, jnp.bfloat16, visible)),
    ("jax.nn.dot_product_attention, bfloat16", gradient(attend, jnp.bfloat16)),
):
    print(f"{name}: {jnp.abs(found - expected).max() / jnp.abs(expected).max():.0e}")
""",
    ),
)
