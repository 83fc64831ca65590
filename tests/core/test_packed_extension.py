"""Packed extensions: new tokens of several sequences in one row, each with its row of the cache.

`cu_seqlens` and `segment_ids` mean in `extend` what they mean in a call, for tokens after those in
the cache. Every result is compared with that of each sequence alone.
"""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import slice_tokens
from tests.core.inputs import inputs_of

BORDERS = [0, 7, 7, 8, 40, 44]
"""Sequences of 7, 0, 1, 32 and 4 tokens, so that two batches are made, and 6 tokens of padding."""
TOKENS, COUNT = 50, len(BORDERS) - 1
MECHANISMS = ("linear", "mlstm", "differential(ccq(gla))", "lucid", "path", "softmax[window=4]")
Q, K, V = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))


def assert_row(cache, i, alone):
    """Row i of a cache is the cache of one sequence, up to the rounding of another batch."""
    assert cache.length[i] == alone.length[0]
    for name, buffer in cache.store.items():
        np.testing.assert_allclose(buffer[i], alone.store[name][0], atol=1e-12, err_msg=name)


@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_packed_extension_is_that_of_each_sequence_alone(expression):
    """Also where keys are masked, which are masked later too."""
    m = pa.parse(expression)
    x = inputs_of(m, b=1, t=TOKENS)
    key_mask = np.arange(TOKENS)[None] % 5 != 4
    for is_masked in (False, True) if expression in ("mlstm", "lucid") else (False,):
        named = {"capacity": 80, "key_mask": is_masked}
        masks = {"key_mask": key_mask} if is_masked else {}
        cache, outputs = m.init_cache(**x, **named, sequences=COUNT), []
        for donate in (False, True):
            out, cache = m.extend(cache, **x, **masks, cu_seqlens=BORDERS, donate=donate)
            outputs.append(out)
        np.testing.assert_allclose(outputs[0], m(**x, **masks, cu_seqlens=BORDERS), atol=1e-12)
        assert not outputs[1][:, BORDERS[-1] :].any()
        for i in range(COUNT):
            start, stop = BORDERS[i : i + 2]
            own, alone = slice_tokens(m, x, start, stop), m.init_cache(**x, **named)
            masks = {"key_mask": key_mask[:, start:stop]} if is_masked else {}
            for out in outputs:
                expected, alone = m.extend(alone, **own, **masks)
                np.testing.assert_allclose(out[:, start:stop], expected, atol=1e-12)
            assert_row(cache, i, alone)


def test_segment_ids_pack_sequences_in_several_rows():
    m = pa.parse("gla")
    x = inputs_of(m, t=6)
    ids = np.asarray([[0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 2]])
    out, cache = m.extend(m.init_cache(**x, sequences=4), **x, segment_ids=ids)
    np.testing.assert_allclose(out, m(**x, segment_ids=ids), atol=1e-12)
    assert cache.length.tolist() == [2, 4, 5, 1]
    last = {name: a[1:, 5:] for name, a in x.items()}
    assert_row(cache, 3, m.extend(m.init_cache(**last), **last)[1])


def test_gradients_pass_through_the_state_of_each_sequence():
    m = pa.parse("differential(gla)")
    x, rng = inputs_of(m, b=1, t=TOKENS), np.random.default_rng(1)
    initial = m.init_cache(**x, sequences=COUNT).states
    initial = {name: rng.normal(size=state.shape) for name, state in initial.items()}
    cache = m.init_cache(**x, sequences=COUNT, states=initial)
    out, after, pull = m.extend_vjp(cache, **x, cu_seqlens=BORDERS)
    d_out = rng.normal(size=out.shape)
    d_after = {name: rng.normal(size=state.shape) for name, state in after.store.items()}
    gradients, d_before = pull(d_out, d_after)
    assert not gradients["q"][:, BORDERS[-1] :].any()
    d_lam = 0.0
    for i in range(COUNT):
        tokens = slice(*BORDERS[i : i + 2])
        own = slice_tokens(m, x, tokens.start, tokens.stop)
        _, _, pull = m.extend_vjp(cache.select([i]), **own)
        of_one, d_one = pull(d_out[:, tokens], {n: a[i : i + 1] for n, a in d_after.items()})
        d_lam = d_lam + of_one["lam"]
        for name in ("q", "k2", "v", "g"):
            np.testing.assert_allclose(gradients[name][:, tokens], of_one[name], atol=1e-11)
        for name, d_state in d_before.items():
            np.testing.assert_allclose(d_state[i], d_one[name][0], atol=1e-11)
    np.testing.assert_allclose(gradients["lam"], d_lam, atol=1e-11)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_autograd_has_the_same_gradients(library):
    m, borders = pa.parse("gla"), [0, 18, 20]
    x, arrays = (inputs_of(m, name, b=1, t=20) for name in ("numpy", library))
    out, _, pull = m.extend_vjp(m.init_cache(**x, sequences=2), **x, cu_seqlens=borders)
    expected, _ = pull(np.ones_like(out))

    def total(k, v):
        inputs = {**arrays, "k": k, "v": v}
        out, _ = m.extend(m.init_cache(**inputs, sequences=2), **inputs, cu_seqlens=borders)
        return out.sum()

    if library == "jax":
        import jax

        found = jax.jit(jax.grad(total, argnums=(0, 1)))(arrays["k"], arrays["v"])
    else:
        k, v = (arrays[name].requires_grad_() for name in "kv")
        total(k, v).backward()
        found = k.grad, v.grad
    for name, gradient in zip("kv", found, strict=True):
        np.testing.assert_allclose(np.asarray(gradient), expected[name], atol=1e-12)


def test_a_compiled_packed_extension_is_the_same_and_no_tokens_leave_the_cache_as_it_is():
    torch, linear = pytest.importorskip("torch"), pa.Linear()
    x = [torch.tensor(a) for a in (Q, K, V)]
    cache = linear.init_cache(*x, sequences=2, states={"S": torch.ones(2, 2, 4, 4).double()})

    def packed(q, k, v, cache):
        out, cache = linear.extend(cache, q, k, v, cu_seqlens=[0, 1, 6])
        return out, cache.states["S"]

    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*x, cache), packed(*x, cache), rtol=0, atol=0)
    out, after = linear.extend(cache, *(a[:, :0] for a in x), cu_seqlens=[0, 0, 0])
    assert out.shape == (1, 0, 2, 4)
    assert torch.equal(after.states["S"], cache.states["S"])


LUCID, BIASED = pa.Lucid(), pa.Softmax(bias=True)
NO_IDS, TWO = np.zeros((1, 6), int), {"cu_seqlens": [0, 1, 2, 6]}
FULL = r"holds at most 4 tokens, and the new ones do not fit (sequence 2 of the packed ones)"
BAD = [
    (
        LUCID,
        {"cu_seqlens": [0, 3, 6]},
        pa.ShapeError,
        "found 2 packed sequences, and 3 in the cache; init_cache(..., sequences=2) makes one",
    ),
    (LUCID, TWO | {"lengths": [6]}, ValueError, "those between their borders; leave lengths out"),
    (LUCID, TWO | {"segment_ids": NO_IDS}, ValueError, "segment_ids and cu_seqlens mean the same"),
    (LUCID, {"cu_seqlens": [0, 4, 2, 6]}, ValueError, "cu_seqlens must not decrease"),
    (LUCID, {"segment_ids": NO_IDS[:, 1:]}, pa.ShapeError, "segment_ids is declared (b s)"),
    (LUCID, {"cu_seqlens": [0, 1, 1, 6]}, ValueError, FULL),
    (BIASED, TWO | {"bias": np.zeros((1, 1, 6, 4))}, ValueError, "can not be divided among packed"),
]


@pytest.mark.parametrize(("m", "masks", "error", "words"), BAD)
def test_bad_borders_of_an_extension_are_refused(m, masks, error, words):
    cache = m.init_cache(Q, K, V, capacity=4, sequences=3)
    with pytest.raises(error, match=f"^{re.escape(str(m))}: .*{re.escape(words)}"):
        m.extend(cache, Q, K, V, **masks)


def test_traced_borders_are_refused():
    jax = pytest.importorskip("jax")
    linear, x = pa.Linear(), [jax.numpy.asarray(a) for a in (Q, K, V)]
    cache = linear.init_cache(*x, sequences=2)
    with pytest.raises(TypeError, match="cu_seqlens of extend has to be read, and is traced here"):
        jax.jit(lambda cu: linear.extend(cache, *x, cu_seqlens=cu))(jax.numpy.asarray([0, 2, 6]))
