"""The Pallas kernels of a decay for each channel against the definition, interpreted.

They serve GLA, GSA, and the delta rule of KDA.

Chunks have 64 tokens in four tiles, so that some tiles are between two others.
"""

import numpy as np
import pytest

pytest.importorskip("jax")


import precondattn as pa
from precondattn_pallas.configurations import REGISTRY, Configuration
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.channel_decay import (
    gradients_of_channels,
    read_of_channels,
    scores_of_channels,
)
from precondattn_pallas.recurrence.chunk_arrays import ChunkPlan
from precondattn_pallas.recurrence.leaves import RecurrenceKernels
from tests.backends.pallas.tiles import (
    BOUNDS,
    check,
    check_extension,
    error,
    frame_of,
    quick,
    rounded,
    small_tiles,
)

KERNELS = RecurrenceKernels(interpret=True)
TILES = {
    key.kernel: Configuration(64, 16)
    for key in REGISTRY.untuned
    if key.kernel.startswith(("chunk_", "channel_", "delta_"))
}
"""Chunks of 64 tokens, blocks of 16 channels."""

EXTREME = [0.0, -1e-6, -20.0, -1e4]


def random_gates(rng, shape, gates):
    return (
        rng.choice(EXTREME, size=shape) if gates == "extreme" else -0.3 * rng.gamma(1, size=shape)
    )


def problem(leaf, t, d=12, e=20, b=1, heads=(2, 4), slots=9, gates="random", keys="random"):
    """Inputs and a cotangent; heads of keys, and of queries or states."""
    rng = np.random.default_rng(t)
    n, m = heads
    sizes = {"b": b, "t": t, "s": t, "d": d, "e": e, "h": m, "u": m, "n": n, "m": slots}
    if getattr(getattr(leaf, "declares", None), "heads", "n") == "u":
        sizes["h"] = n
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in leaf.inputs.items()}
    x["g"] = random_gates(rng, x["g"].shape, gates)
    if "s" in x:
        x["s"] = rng.uniform(size=x["s"].shape)
    if "beta" in x:
        if keys == "clustered":
            x["k"] = 0.1 * x["k"] + rng.normal(size=d)
        x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
        x["beta"] = rng.uniform(0, 2, size=x["beta"].shape)
        x["beta"][:, ::4] = 0
        x["k"][:, 1::4] = 0
    return x, rng.normal(size=leaf.program.output.shape(sizes))


def check_leaf(leaf, t, dtype="float32", frame=None, **options):
    x, cotangent = problem(leaf, t, **options)
    frame = frame or frame_of(t, t, x["k"].shape[0])
    check(KERNELS, leaf, x, cotangent, frame, dtype, BOUNDS[dtype], **TILES)


def test_a_chunks_scores_and_their_gradients():
    """F(A, q, k) = Σ_{j≤i,c} A_ij q_ic k_jc D_ijc for two queries per key, in two chunks.

    Gates are weak in half of the channels, and open or closed in the others.
    """
    rng = np.random.default_rng(0)
    given, exact = {}, {}
    for name, shape in {"q": (1, 2, 128, 32), "k": (1, 128, 32), "a": (1, 2, 128, 64)}.items():
        given[name], exact[name] = rounded(rng.normal(size=shape), "float32")
    gates = [random_gates(rng, (1, 128, 16), which) for which in ("random", "extreme")]
    gates = np.maximum(np.concatenate(gates, axis=2), -200)
    given["g"], exact["g"] = rounded(gates, "float32")
    plan = ChunkPlan(Products(interpret=True, tf32=False), 64, 32)

    def run(x):
        a = x.pop("a")
        gradients = gradients_of_channels(plan, x, a)
        return scores_of_channels(plan, x), read_of_channels(plan, x, a), *gradients

    with small_tiles(**TILES):
        result = quick(run)(given)

    q, a = (exact[name].reshape(2, 2, 64, -1) for name in "qa")
    k, g = (exact[name].reshape(2, 64, 32) for name in "kg")
    total = np.cumsum(g, axis=1)
    i, j, t = np.ogrid[:64, :64, :64]
    sums = np.minimum(total[:, :, None] - total[:, None], 0)
    decay = np.where((j <= i)[..., 0, None], np.exp(sums), 0)
    crossing = ((j < t) & (t <= i)).astype(float)
    parts = np.einsum("rnij,rnic,njc,nijc->nijc", a, q, k, decay)
    expected = (
        np.einsum("rnic,njc,nijc->rnij", q, k, decay),
        np.einsum("rnij,njc,nijc->rnic", a, k, decay),
        np.einsum("rnij,njc,nijc->rnic", a, k, decay),
        np.einsum("rnij,rnic,nijc->njc", a, q, decay),
        np.einsum("ijt,nijc->ntc", crossing, parts),
    )
    for index, (array, correct) in enumerate(zip(result, expected, strict=True)):
        assert error(array, correct.reshape(array.shape)) < 1e-5, index


@pytest.mark.thorough
@pytest.mark.parametrize("leaf", [pa.GLA(), pa.KDA()], ids=str)
def test_one_token_more_than_a_chunk_and_blocks_of_channels(leaf):
    check_leaf(leaf, 65, "bfloat16", d=20, e=72)


@pytest.mark.thorough
def test_nearly_equal_keys_and_open_gates_next_to_closed_ones():
    check_leaf(pa.KDA(), 63, heads=(1, 1), gates="extreme", keys="clustered")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [(pa.GLA(scale=0.3), "float32"), (pa.GSA(), "float16"), (pa.KDA(scale=0.3), "float16")],
    ids=str,
)
def test_padding_segments_and_open_gates_next_to_closed_ones(leaf, dtype):
    frame = frame_of(70, 70, 2, lengths=(70, 3), segments=(20, 9))
    check_leaf(leaf, 70, dtype, frame=frame, b=2, heads=(1, 1), gates="extreme")


@pytest.mark.thorough
@pytest.mark.parametrize("leaf", [pa.GLA(), pa.GSA(), pa.KDA()], ids=str)
def test_an_extension_and_its_gradient(leaf):
    x, cotangent = problem(leaf, 19)
    check_extension(KERNELS, leaf, x, cotangent, 2e-5, **TILES)
