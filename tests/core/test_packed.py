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
from precondattn_jax.layout import QueryBlocks
from precondattn_jax.masks import Mask
from tests.core import inputs as made

LENGTHS = (3, 40, 2, 41, 1, 3, 19, 40)
T = sum(LENGTHS)
IDS = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None].astype(np.int32)


def inputs_of(text, b=1):
    return pa.parse(text), made.inputs_of(text, b=b, t=T, h=2, n=1, d=4, e=5)


def require_close(found, expected):
    """Of outputs and gradients."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-9, atol=1e-11)
    for name, gradient in expected[1].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-8, atol=1e-10, err_msg=name)


def by_numpy(mechanism, x, **options):
    out, pullback = mechanism.vjp(**x, **options)
    return out, pullback(np.cos(np.arange(out.size)).reshape(out.shape))


def by_torch(mechanism, x, **options):
    leaves = {name: torch.from_numpy(a).requires_grad_() for name, a in x.items()}
    options = {n: torch.from_numpy(a) for n, a in options.items()}
    out = mechanism(**leaves, **options)
    cotangent = torch.arange(out.numel(), dtype=out.dtype).cos().reshape(out.shape)
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return out.detach().numpy(), dict(zip(leaves, (g.numpy() for g in gradients), strict=True))


SEGMENTS = {"segment_ids": IDS}
OF_TWO_ROWS = {
    "segment_ids": np.concatenate([IDS, IDS[:, ::-1]]),
    "lengths": np.asarray([T - 30, T]),
    "key_mask": np.random.default_rng(1).random((2, T)) < 0.8,
}


@pytest.mark.parametrize(
    ("text", "by", "masks"),
    [
        *((text, by_numpy, SEGMENTS) for text in ("softmax[causal=false, window=7]", "path")),
        *(("lucid[normalize=rows]", by_numpy, SEGMENTS), ("gated_delta", by_numpy, SEGMENTS)),
        *(("lucid[beta=true]", by_torch, SEGMENTS), ("differential", by_torch, SEGMENTS)),
        *(("lucid", by_numpy, OF_TWO_ROWS), ("laser", by_torch, OF_TWO_ROWS)),
    ],
)
def test_batches_of_segments_equal_the_masked_definition(text, by, masks):
    mechanism, x = inputs_of(text, b=len(masks["segment_ids"]))
    require_close(by(mechanism, x, **masks), by_numpy(mechanism, x, **masks, backend="reference"))


def test_segments_of_similar_lengths_are_one_batch_which_an_explanation_names(monkeypatch):
    sizes, run = [], evaluation.forward

    def counted(call):
        sizes.append((call.sizes["b"], call.sizes["t"]))
        return run(call)

    monkeypatch.setattr(evaluation, "forward", counted)
    equal, ours = np.arange(T)[None] // (T // 4 + 1), [(3, 19), (3, 41), (2, 2)]
    for text, ids, batches in (
        ("softmax", IDS, ours),
        ("softmax", equal, [(4, 38)]),
        ("gated_delta", IDS, [(1, T)]),  # It relates no pairs.
    ):
        mechanism, x = inputs_of(text)
        mechanism(**x, segment_ids=ids)
        assert sizes == batches
        sizes.clear()
    m, x = inputs_of("softmax")
    explanation = m.explain(**x, segment_ids=IDS)
    assert explanation.batches == tuple(ours)
    assert "segments as batches: 3 x 19 tokens, 3 x 41 tokens, 2 x 2 tokens" in str(explanation)
    assert m.explain(**x, segment_ids=IDS, backend="reference").batches == ()
    solve = pa.LucidSolve()  # It has keys and no queries.
    assert solve.explain(k=x["k"], v=x["v"], segment_ids=IDS).batches == tuple(ours)


def test_half_precision_and_autocast():
    mechanism, x = inputs_of("lucid")
    expected = mechanism(**x, segment_ids=IDS)
    narrow, wide = (
        {n: torch.tensor(a, dtype=dtype, requires_grad=True) for n, a in x.items()}
        for dtype in (torch.float16, torch.float32)
    )
    ids = torch.from_numpy(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        out = mechanism(**wide, segment_ids=ids)
        gradients = torch.autograd.grad(out.sum(), list(wide.values()))
    assert out.dtype == torch.bfloat16
    assert {g.dtype for g in gradients} == {torch.float32}
    for result in (out, mechanism(**narrow, segment_ids=ids)):
        np.testing.assert_allclose(result.detach().float().numpy(), expected, atol=0.1)


Q, K, V = np.random.default_rng(3).normal(size=(3, 1, 6, 2, 4))
THREE = np.asarray([0, 2, 2, 6], dtype=np.int32)
SAME = np.asarray([[0, 0, 1, 1, 1, 1]])


def test_cu_seqlens_mean_the_same_as_segment_ids_in_every_form():
    lucid = pa.Lucid()
    expected = lucid(Q, K, V, segment_ids=SAME)
    for given in (THREE.tolist(), tuple(THREE.tolist()), THREE.astype("int8"), THREE.astype("u8")):
        for out in (lucid(Q, K, V, cu_seqlens=given), lucid.vjp(Q, K, V, cu_seqlens=given)[0]):
            np.testing.assert_array_equal(out, expected)
    for convert in (torch.from_numpy, jnp.asarray):
        x = [convert(a) for a in (Q, K, V)]
        for given in (THREE, convert(THREE), convert(THREE.astype("uint8"))):
            found = lucid(*x, cu_seqlens=given)
            np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


def test_cu_seqlens_that_are_traced_or_compiled():
    expected = pa.Lucid()(Q, K, V, segment_ids=SAME)
    padded = pa.Lucid()(Q, K, V, cu_seqlens=[0, 1, 1, 4])
    for convert, compiled in (
        (jnp.asarray, jax.jit),
        (torch.asarray, torch.compile(backend="aot_eager", fullgraph=True)),
    ):
        x = [convert(a) for a in (Q, K, V)]
        run = compiled(lambda bounds, x=x: pa.lucid(*x, cu_seqlens=bounds))
        found = np.asarray(run(convert(THREE)))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        found = np.asarray(run(convert(np.asarray([0, 1, 1, 4], np.int32))))
        np.testing.assert_allclose(found, padded, rtol=1e-12)
        for bad in ([1, 2, 2, 6], [0, 4, 2, 6], [0, 2, 2, 7]):
            assert np.isnan(np.asarray(run(convert(np.asarray(bad, np.int32))))).all()


FOUR = np.asarray([0, 1, 4])
"""The last two of six tokens are padding."""


@pytest.mark.parametrize("text", ["lucid", "softmax[causal=false]", "path", "gated_delta", "gsa"])
def test_tokens_after_the_last_sequence_are_padding(text):
    """As with lengths, which the conformance suite compares with calls without padding."""
    mechanism, x = pa.parse(text), made.inputs_of(text, b=1, t=6, h=2)
    for name, pattern in mechanism.inputs.items():
        if {*"ts"} & {*pattern.letters}:
            x[name][:, 4:] = np.nan
    masks = {"segment_ids": np.asarray([[0, 1, 1, 1, 2, 2]]), "lengths": np.asarray([4])}
    expected = by_numpy(mechanism, x, **masks)
    assert not expected[0][:, 4:].any()
    for options in ({}, {"backend": "reference"}):
        require_close(by_numpy(mechanism, x, cu_seqlens=FOUR, **options), expected)
    require_close(by_torch(mechanism, x, cu_seqlens=FOUR), expected)


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
        ([0, 2**32 + 6], ValueError, "cu_seqlens must end at s = 6 or before; found 4294967302"),
        (np.asarray([0, 9, 6], dtype=np.uint8), ValueError, "must not decrease; found 6 after 9"),
        ([0, 6.0], TypeError, "cu_seqlens must be whole numbers"),
        ([6], pa.ShapeError, r"cu_seqlens must have shape \(n \+ 1,\) for n sequences; found \(1,"),
        (np.asarray([0.0, 6.0]), TypeError, "must have an integer dtype; found float64"),
        ("0,6", TypeError, "cu_seqlens must be a list of whole numbers or an array of numpy;"),
        (torch.tensor([0, 6]), TypeError, "array of numpy; found one of torch"),
    ],
)
def test_bad_cu_seqlens_are_refused(given, error, text):
    for verb in (pa.Lucid(), pa.Lucid().vjp, pa.Lucid().explain, pa.lucid):
        with pytest.raises(error, match=f"lucid: .*{text}"):
            verb(Q, K, V, cu_seqlens=given)
    with pytest.raises(ValueError, match="segment_ids and cu_seqlens mean the same: give one"):
        pa.lucid(Q, K, V, cu_seqlens=THREE, segment_ids=SAME)
    two = np.concatenate([Q, Q])
    with pytest.raises(pa.ShapeError, match=r"so b = 1 is expected; found b = 2 \(use segment_ids"):
        pa.lucid(two, two, two, cu_seqlens=THREE)


def test_jax_computes_the_blocks_of_keys_of_the_segments_of_a_block_of_queries():
    ids = jnp.asarray(np.repeat([0, 1, 2], [100, 60, 96])[None])
    frame = full_frame(256, 256, ids, segment_ids=ids)
    mask = Mask(frame, QueryBlocks(256, 256, 32))
    rows = jnp.arange(8)
    assert [int(mask.first(a)) for a in rows] == [0, 0, 0, 0, 3, 5, 5, 5]
    assert [int(mask.stop(a)) for a in rows] == [4, 4, 4, 5, 5, 8, 8, 8]
