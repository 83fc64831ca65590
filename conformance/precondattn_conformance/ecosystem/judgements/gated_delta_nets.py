"""The judgements of chunked gated delta rules in several projects."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "maxtext/jax_chunk_gated_delta_rule maxtext/naive_jax_chunk_gated_delta_rule "
        "easydel/chunk_kda megatron/torch_chunk_gated_delta_rule "
        "gated-delta-net/chunk_gated_delta_rule_ref",
        ("stability",),
        DEFECT,
        "The decay between two tokens is a difference of cumulative sums of gates in "
        "float32, so that after a gate that forgets everything (−10,000), gates near 0 "
        "have lost their digits. It needs gates of thousands; forms of the same that go "
        "from token to token are right.",
        code="""\
from importlib import import_module

import numpy as np

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(3, 1, 64, 1, 4))
k /= np.linalg.norm(k, axis=-1, keepdims=True)
g, beta = np.full((1, 64, 1), -0.03), np.full((1, 64, 1), 0.5)
g[:, 0] = -10_000  # the first token forgets all before it
expected = pa.gated_delta(q, k, v, g=g, beta=beta)

for name in (
    "maxtext/jax_chunk_gated_delta_rule",
    "maxtext/jax_ar_gated_delta_rule",  # one token after the other
    "easydel/chunk_kda",
    "megatron/torch_chunk_gated_delta_rule",
    "gated-delta-net/chunk_gated_delta_rule_ref",
):
    peer = peer_named(name)
    backend = peer.backend()
    pa.register_backend(backend)
    asarray = import_module({"jax": "jax.numpy"}.get(peer.library, peer.library)).asarray
    x = [asarray(each.astype("float32")) for each in (q, k, v, g, beta)]
    out = pa.gated_delta(*x[:3], g=x[3], beta=x[4], backend=backend.name)
    print(f"{name}: {np.abs(np.asarray(out) - expected).max() / np.abs(expected).max():.1e}")
""",
    ),
)
