"""Packed calls as batches of their segments, and `cu_seqlens`."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import jax
import jax.numpy as jnp
import torch

import precondattn as pa
from precondattn.execution import evaluation
from precondattn.frame import full_frame
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_jax.layout import QueryBlocks
from precondattn_jax.masks import Mask

LENGTHS = (3, 40, 2, 41, 1, 3, 19, 40)
T = sum(LENGTHS)
IDS = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None].astype(np.int32)
MECHANISMS = (
    *("softmax[causal=false, window=7]", "lucid[normalize=rows]", "lucid[beta=true]", "laser"),
    *("path", "differential", "gated_delta", "ccq[covariance=query_weighted](linear)"),
)


def inputs_of(text, b=1, seed=0):
    mechanism = pa.parse(text)
    layout = CallLayout("packed", b=b, t=T, s=T, h=2, n=1, d=4, e=5)
    return mechanism, make_inputs(mechanism, layout, "random", seed)


def cotangent_of(out):
    return np.random.default_rng(9).normal(size=out.shape)


def agree(ours, theirs):
    out, gradients = ours
    expected, expected_gradients = theirs
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-11)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-8, atol=1e-10, err_msg=name)


def by_numpy(mechanism, x, **options):
    out, pullback = mechanism.vjp(**x, **options)
    return out, pullback(cotangent_of(out))


def by_torch(mechanism, x, **options):
    leaves = {name: torch.from_numpy(a).requires_grad_() for name, a in x.items()}
    options = {n: torch.from_numpy(a) for n, a in options.items()}
    out = mechanism(**leaves, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), torch.from_numpy(cotangent_of(out)))
    return out.detach().numpy(), dict(zip(leaves, (g.numpy() for g in gradients), strict=True))


@pytest.fixture
def batches(monkeypatch):
    """The (b, t) of every evaluation."""
    sizes = []
    run = evaluation.forward

    def counted(call):
        sizes.append((call.sizes["b"], call.sizes["t"]))
        return run(call)

    monkeypatch.setattr(evaluation, "forward", counted)
    return sizes


@pytest.mark.parametrize(
    ("text", "by"),
    [
        *((text, by_numpy) for text in MECHANISMS),
        ("laser", by_torch),
        ("lucid[beta=true]", by_torch),
    ],
)
def test_batches_of_segments_equal_the_masked_definition(text, by):
    mechanism, x = inputs_of(text)
    expected = by_numpy(mechanism, x, segment_ids=IDS, backend="reference")
    agree(by(mechanism, x, segment_ids=IDS), expected)


@pytest.mark.parametrize(("text", "by"), [("lucid", by_numpy), ("laser", by_torch)])
def test_padding_and_masked_keys_of_several_rows(text, by):
    mechanism, x = inputs_of(text, b=2)
    masks = {
        "segment_ids": np.concatenate([IDS, IDS[:, ::-1]]),
        "lengths": np.asarray([T - 30, T]),
        "key_mask": np.random.default_rng(1).random((2, T)) < 0.8,
    }
    expected = by_numpy(mechanism, x, **masks, backend="reference")
    agree(by(mechanism, x, **masks), expected)


def test_segments_of_similar_lengths_are_one_batch(batches):
    mechanism, x = inputs_of("softmax")
    mechanism(**x, segment_ids=IDS)
    assert batches == [(3, 19), (3, 41), (2, 2)]
    batches.clear()
    equal = np.repeat(np.arange(T), 1)[None] // (T // 4 + 1)
    mechanism(**x, segment_ids=equal)
    assert batches == [(4, 38)]
    batches.clear()
    mechanism, x = inputs_of("gated_delta")
    mechanism(**x, segment_ids=IDS)  # It relates no pairs.
    assert batches == [(1, T)]


@pytest.mark.thorough
def test_derivatives_and_transforms_of_pytorch():
    x = [torch.randn(1, 12, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, 2, 9, 12], dtype=torch.int32)

    def call(*arrays):
        return pa.lucid(*arrays, cu_seqlens=bounds)

    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(call, x)
    (expected,) = torch.autograd.grad(call(*x).sum(), x[:1])
    plain = [a.detach() for a in x]
    found = torch.func.grad(lambda q: call(q, *plain[1:]).sum())(plain[0])
    torch.testing.assert_close(found, expected)
    mapped = torch.vmap(call)(*(a[None] for a in plain))
    torch.testing.assert_close(mapped[0], call(*plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(dtype):
    mechanism, x = inputs_of("lucid")
    expected = mechanism(**x, segment_ids=IDS)
    narrow = {n: torch.tensor(a).to(dtype).requires_grad_() for n, a in x.items()}
    wide = {n: torch.tensor(a).float().requires_grad_() for n, a in x.items()}
    ids = torch.from_numpy(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        out = mechanism(**wide, segment_ids=ids)
        gradients = torch.autograd.grad(out.sum(), list(wide.values()))
    assert out.dtype == torch.bfloat16
    assert {g.dtype for g in gradients} == {torch.float32}
    for result in (out, mechanism(**narrow, segment_ids=ids)):
        np.testing.assert_allclose(result.detach().float().numpy(), expected, atol=0.1)


def test_a_bad_value_reaches_its_own_segment_only():
    mechanism, x = inputs_of("laser")
    x["v"][0, 50] = np.nan
    out, gradients = by_torch(mechanism, x, segment_ids=IDS)
    is_bad = np.isnan(out).any(axis=(0, 2, 3))
    np.testing.assert_array_equal(is_bad, (IDS[0] == IDS[0, 50]) & (np.arange(T) >= 50))
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_an_explanation_names_the_batches():
    mechanism, x = inputs_of("softmax")
    for m in (mechanism, pa.Laser()):
        explanation = m.explain(**x, segment_ids=IDS)
        assert explanation.batches == ((3, 19), (3, 41), (2, 2))
        assert "segments as batches: 3 x 19 tokens, 3 x 41 tokens, 2 x 2 tokens" in str(explanation)
        assert m.explain(**x, segment_ids=IDS, backend="reference").batches == ()
    solve = pa.LucidSolve()  # It has keys and no queries.
    assert solve.explain(k=x["k"], v=x["v"], segment_ids=IDS).batches == explanation.batches


# -------------------------------------------------------------------------------- cu_seqlens

Q, K, V = np.random.default_rng(3).normal(size=(3, 1, 6, 2, 4))
THREE = np.asarray([0, 2, 2, 6], dtype=np.int32)
SAME = np.asarray([[0, 0, 1, 1, 1, 1]])


def test_cu_seqlens_mean_the_same_as_segment_ids_in_every_form():
    lucid = pa.Lucid()
    expected = lucid(Q, K, V, segment_ids=SAME)
    dtypes = ("int8", "int16", "int64", "uint8", "uint64")
    for given in (THREE.tolist(), tuple(THREE.tolist()), *map(THREE.astype, dtypes)):
        np.testing.assert_array_equal(lucid(Q, K, V, cu_seqlens=given), expected)
        np.testing.assert_array_equal(lucid.vjp(Q, K, V, cu_seqlens=given)[0], expected)
        np.testing.assert_array_equal(pa.lucid(Q, K, V, cu_seqlens=given), expected)
    for convert in (torch.from_numpy, jnp.asarray):
        x = [convert(a) for a in (Q, K, V)]
        for given in (THREE, convert(THREE), convert(THREE.astype("uint8"))):
            found = lucid(*x, cu_seqlens=given)
            np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


def test_cu_seqlens_that_are_traced_or_compiled():
    expected = pa.Lucid()(Q, K, V, segment_ids=SAME)
    for convert, compiled in (
        (jnp.asarray, jax.jit),
        (torch.asarray, torch.compile(backend="aot_eager", fullgraph=True)),
    ):
        x = [convert(a) for a in (Q, K, V)]
        run = compiled(lambda bounds, x=x: pa.lucid(*x, cu_seqlens=bounds))
        found = np.asarray(run(convert(THREE)))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for bad in ([1, 2, 2, 6], [0, 4, 2, 6], [0, 2, 2, 7]):
            assert np.isnan(np.asarray(run(convert(np.asarray(bad, np.int32))))).all()


FOUR = np.asarray([0, 1, 4])
"""The last two of six tokens are padding."""


def padded(text):
    """A mechanism, its inputs with NaN in the padding, and the output and gradients without it."""
    mechanism = pa.parse(text)
    inputs = make_inputs(
        mechanism, CallLayout("padded", b=1, t=6, s=6, h=2, n=2, d=4, e=4), "random"
    )
    of_tokens = {n for n, pattern in mechanism.inputs.items() if {*"ts"} & {*pattern.letters}}
    x = {n: np.array(a) for n, a in inputs.items()}
    without = {n: a[:, :4] if n in of_tokens else a for n, a in x.items()}
    out, pullback = mechanism.vjp(**without, cu_seqlens=FOUR)
    gradients = pullback(np.ones_like(out))
    for name in of_tokens:
        x[name][:, 4:] = np.nan
        gradients[name] = np.pad(gradients[name], [(0, 0), (0, 2), *[(0, 0)] * (x[name].ndim - 2)])
    return mechanism, x, np.pad(out, [(0, 0), (0, 2), (0, 0), (0, 0)]), gradients


def require_padded(found, gradients, expected, expected_gradients):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-8, atol=1e-10, err_msg=name)


PADDED = ("lucid", "softmax[causal=false]", "laser", "path", "gated_delta", "ccq(gla)", "gsa")


@pytest.mark.parametrize("text", PADDED)
def test_tokens_after_the_last_sequence_are_padding(text):
    mechanism, x, out, gradients = padded(text)
    for options in ({}, {"backend": "reference"}):
        found, pullback = mechanism.vjp(**x, cu_seqlens=FOUR, **options)
        require_padded(found, pullback(np.ones_like(found)), out, gradients)
    leaves = {n: torch.from_numpy(a).requires_grad_() for n, a in x.items()}
    found = mechanism(**leaves, cu_seqlens=torch.from_numpy(FOUR))
    of_torch = torch.autograd.grad(found.sum(), list(leaves.values()))
    require_padded(found.detach(), dict(zip(leaves, of_torch, strict=True)), out, gradients)


@pytest.mark.thorough
def test_padding_after_traced_cu_seqlens():
    mechanism, x, out, gradients = padded("lucid")
    x = {n: jnp.asarray(a) for n, a in x.items()}

    @jax.jit
    def run(x, bounds):
        found, pullback = jax.vjp(lambda x: mechanism(**x, cu_seqlens=bounds), x)
        return found, pullback(jnp.ones_like(found))[0]

    require_padded(*run(x, jnp.asarray(FOUR, dtype=jnp.uint8)), out, gradients)
    whole = {n: torch.from_numpy(np.nan_to_num(a)) for n, a in x.items()}
    compiled = torch.compile(backend="aot_eager", fullgraph=True)(
        lambda bounds: mechanism(**whole, cu_seqlens=bounds)
    )
    np.testing.assert_allclose(compiled(torch.from_numpy(FOUR)), out, rtol=1e-9, atol=1e-11)


def test_lengths_and_the_end_of_cu_seqlens_together():
    expected = pa.lucid(Q, K, V, segment_ids=SAME, lengths=[3])
    for lengths, bounds in (([3], [0, 2, 5]), ([5], [0, 2, 3]), ([6], [0, 2, 3])):
        found = pa.lucid(Q, K, V, cu_seqlens=bounds, lengths=lengths)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not pa.lucid(Q, K, V, cu_seqlens=[0, 0]).any()
    assert str(pa.Lucid().explain(Q, K, V, cu_seqlens=[0, 2, 3]))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([1, 6], ValueError, "cu_seqlens must start at 0; found 1"),
        ([0, 4, 2, 6], ValueError, r"cu_seqlens must not decrease; found 2 after 4 \(entry 2\)"),
        ([0, 7], ValueError, "cu_seqlens must end at s = 6 or before; found 7"),
        ([0, 2**32 + 6], ValueError, "cu_seqlens must end at s = 6 or before; found 4294967302"),
        (np.asarray([0, 2**32 + 6]), ValueError, "s = 6 or before; found 4294967302"),
        (np.asarray([0, 9, 6], dtype=np.uint8), ValueError, "must not decrease; found 6 after 9"),
        ([0, 6.0], TypeError, "cu_seqlens must be whole numbers"),
        ([6], pa.ShapeError, r"cu_seqlens must have shape \(n \+ 1,\) for n sequences; found \(1,"),
        (np.asarray([0.0, 6.0]), TypeError, "must have an integer dtype; found float64"),
        (np.asarray([False, True]), TypeError, "must have an integer dtype; found bool"),
        ("0,6", TypeError, "cu_seqlens must be a list of whole numbers or an array of numpy;"),
        (torch.tensor([0, 6]), TypeError, "array of numpy; found one of torch"),
    ],
)
def test_bad_cu_seqlens_are_refused(given, error, text):
    for verb in (pa.Lucid(), pa.Lucid().vjp, pa.Lucid().explain, pa.lucid):
        with pytest.raises(error, match=f"lucid: .*{text}"):
            verb(Q, K, V, cu_seqlens=given)


def test_cu_seqlens_are_for_one_row_and_without_segment_ids():
    with pytest.raises(ValueError, match="segment_ids and cu_seqlens mean the same: give one"):
        pa.lucid(Q, K, V, cu_seqlens=THREE, segment_ids=SAME)
    two = np.concatenate([Q, Q])
    with pytest.raises(pa.ShapeError, match=r"so b = 1 is expected; found b = 2 \(use segment_ids"):
        pa.lucid(two, two, two, cu_seqlens=THREE)


# -------------------------------------------------------------------------------- JAX's loops


def test_jax_computes_the_blocks_of_keys_of_the_segments_of_a_block_of_queries():
    ids = jnp.asarray(np.repeat([0, 1, 2], [100, 60, 96])[None])
    frame = full_frame(256, 256, ids, segment_ids=ids)
    mask = Mask(frame, QueryBlocks(256, 256, 32))
    rows = jnp.arange(8)
    assert [int(mask.first(a)) for a in rows] == [0, 0, 0, 0, 3, 5, 5, 5]
    assert [int(mask.stop(a)) for a in rows] == [4, 4, 4, 5, 5, 8, 8, 8]
