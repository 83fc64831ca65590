"""The gated delta rule and its variants by Pallas kernels against the definition, interpreted."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

import precondattn as pa
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_pallas.configurations import REGISTRY, Configuration
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse
from precondattn_pallas.recurrence.chunk_tiles import pairs_of
from precondattn_pallas.recurrence.leaves import RecurrenceKernels
from tests.backends.pallas.tiles import BOUNDS, check, check_extension, error, frame_of, rounded

KERNELS = RecurrenceKernels(interpret=True)
TILES = {
    key.kernel: Configuration(16, 16)
    for key in REGISTRY.untuned
    if key.kernel.startswith(("chunk_", "delta_"))
}
"""Chunks of 16 tokens, blocks of 16 channels."""


def problem(leaf, t, d=12, e=20, b=2, heads=(2, 4), keys="random", gates="random"):
    """Inputs and a cotangent; `heads` are those of keys, and those of states or queries."""
    rng = np.random.default_rng(t)
    n, m = heads
    sizes = {"b": b, "t": t, "s": t, "d": d, "e": e, "h": m, "u": m, "n": n}
    if getattr(getattr(leaf, "declares", None), "heads", "n") == "u":
        sizes["h"] = n
    shapes = {name: pattern.shape(sizes) for name, pattern in leaf.inputs.items()}
    x = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if keys == "clustered":
        x["k"] = 0.1 * x["k"] + rng.normal(size=(1, 1, *x["k"].shape[2:]))
    if keys == "equal":
        x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape).copy()
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    if keys == "zero":
        x["k"][:, ::3] = 0
    for name in ("p", "erase"):
        if name in x:
            x[name] = (x["k"] + 0.1 * x[name]) / 2
    for name in ("g", "g_atk"):
        if name in x:
            x[name] = -0.3 * np.abs(x[name])
            if gates == "extreme":
                x[name] = rng.choice([0.0, -1e-6, -20.0, -1000.0], size=x[name].shape)
    for name in ("b", "w", "beta_atk"):
        if name in x:
            x[name] = rng.uniform(size=x[name].shape)
    if "beta" in x:
        x["beta"] = rng.uniform(0, 2, size=x["beta"].shape)
        x["beta"][:, ::4] = 0
    return x, rng.normal(size=leaf.program.output.shape(sizes))


def check_leaf(leaf, t, dtype="float32", frame=None, bound=None, **options):
    x, cotangent = problem(leaf, t, **options)
    frame = frame or frame_of(t, t, x["k"].shape[0])
    check(KERNELS, leaf, x, cotangent, frame, dtype, bound or BOUNDS[dtype], **TILES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("t", "dtype", "d", "e"),
    [(33, "float32", 12, 20), (31, "bfloat16", 40, 72), (1, "float16", 8, 8)],
)
def test_lengths_around_a_chunk_blocks_of_channels_and_every_dtype(t, dtype, d, e):
    check_leaf(pa.GatedDelta(), t, dtype, d=d, e=e)


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_keys_that_coincide_or_nearly_do(keys):
    check_leaf(pa.GatedDelta(), 40, keys=keys, b=1, heads=(1, 1), bound=1e-4)


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_coinciding_keys_cost_a_precise_kernel_no_accuracy_in_float16(monkeypatch, keys):
    monkeypatch.setenv(VARIABLE, "1")
    check_leaf(pa.Delta(), 40, "float16", keys=keys, b=1, heads=(1, 1), bound=8e-4)


def test_zero_keys_and_open_gates_next_to_closed_ones():
    check_leaf(pa.GatedDelta(), 40, keys="zero", gates="extreme", b=1)


@pytest.mark.parametrize(
    "leaf", [pa.Delta(scale=0.3), pa.SSD(), pa.Retention(), pa.Linear(normalize=True)], ids=str
)
def test_special_cases_run_by_the_same_kernels(leaf):
    if leaf == pa.Linear(normalize=True):
        x, cotangent = problem(leaf, 20, b=1)
        x = {name: np.abs(a) if name in "qk" else a for name, a in x.items()}
        check(KERNELS, leaf, x, cotangent, frame_of(20, 20, 1), "float32", 2e-5, **TILES)
        return
    check_leaf(leaf, 20, b=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("leaf", "t", "dtype"),
    [
        ("gdn2", 33, "float32"),
        ("gdn2[scale=0.3]", 17, "bfloat16"),
        ("comba", 33, "float32"),
        ("comba[scale=0.3]", 17, "bfloat16"),
        ("comba[erases=decayed]", 17, "float16"),
        ("delta_product", 17, "float32"),
        ("delta_product[steps=3,scale=0.3]", 9, "bfloat16"),
        ("erasing_delta", 17, "float32"),
        ("erasing_gated_delta", 33, "float32"),
        ("erasing_kda", 17, "float16"),
        ("erasing_gdn2", 17, "float32"),
        ("preconditioned_key", 33, "float32"),
        ("preconditioned_key[learned=true]", 9, "bfloat16"),
    ],
)
def test_rules_that_erase_or_write_otherwise_run_by_the_same_kernels(leaf, t, dtype):
    check_leaf(pa.parse(leaf), t, dtype, b=1, gates="extreme" if t > 30 else "random")


def test_a_token_of_comba_extends_its_cache():
    x, cotangent = problem(pa.Comba(), 19, b=1)
    check_extension(KERNELS, pa.Comba(), x, cotangent, 2e-5, **TILES)


@pytest.mark.thorough
def test_contracted_queries_run_by_the_same_kernels():
    rng = np.random.default_rng(0)
    x = {"q": rng.normal(size=(1, 20, 4, 12)), "k": rng.normal(size=(1, 20, 2, 12))}
    x |= {"contraction": rng.uniform(size=(1, 20, 4)), "g": -np.abs(rng.normal(size=(1, 20, 4)))}
    leaf, cotangent = pa.ConditionedQuery(decay="head"), rng.normal(size=(1, 20, 4, 12))
    check(KERNELS, leaf, x, cotangent, frame_of(20, 20, 1), "bfloat16", 2e-2, **TILES)


@pytest.mark.parametrize(("t", "lengths"), [(20, None), (9, (20, 11))])
def test_masking_a_key_does_not_mask_the_contraction_of_its_query(t, lengths):
    rng = np.random.default_rng(0)
    x = {"q": rng.normal(size=(2, t, 4, 12)), "k": rng.normal(size=(2, 20, 2, 12))}
    x["contraction"] = rng.uniform(size=(2, t, 4))
    key_mask = rng.uniform(size=(2, 20)) < 0.5
    frame = frame_of(t, 20, 2, lengths=lengths, key_mask=key_mask)
    leaf, cotangent = pa.ConditionedQuery(decay="none"), rng.normal(size=x["q"].shape)
    check(KERNELS, leaf, x, cotangent, frame, "float32", 1e-5, **TILES)


def test_padding_and_other_segments_have_no_effect():
    frame = frame_of(40, 40, 2, lengths=(40, 3), segments=(20, 9))
    check_leaf(pa.GatedDelta(), 40, frame=frame, heads=(1, 1))


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_an_inverse_of_64_tokens_is_accurate(keys):
    """The Neumann series by repeated doubling would lose all digits."""
    x, _ = problem(pa.Delta(), 64, b=1, heads=(1, 1), keys=keys)
    k = x["k"][0, :, 0]
    given, strict = rounded(np.tril(2 * k @ k.T, -1), "float32")
    result = unit_lower_inverse(Products(interpret=True, tf32=False), given)
    assert error(result, np.linalg.inv(np.eye(64) + strict)) < 2e-5


def test_a_strong_gate_costs_later_weak_gates_no_accuracy():
    g = -np.abs(np.random.default_rng(0).normal(size=64)) * 1e-3
    g[5] = -150.0
    result = pairs_of({"g": jnp.asarray(g, dtype="float32")}, 64)
    total = np.cumsum(g)
    expected = np.tril(np.exp(np.minimum(total[:, None] - total[None, :], 0)))
    assert error(result, expected) < 1e-6


def test_an_extension_and_its_gradient():
    x, cotangent = problem(pa.GatedDelta(), 19, b=1)
    check_extension(KERNELS, pa.GatedDelta(), x, cotangent, 2e-5, **TILES)
