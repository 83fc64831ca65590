"""Packed extensions: new tokens of several sequences in one row, each with its row of the cache.

`cu_seqlens` and `segment_ids` mean in `extend` what they mean in a call, for tokens after those in
the cache. Every result is compared with that of each sequence alone.
"""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

BORDERS = [0, 7, 7, 8, 40, 44]
"""Sequences of 7, 0, 1, 32 and 4 tokens, so that two batches are made, and 6 tokens of padding."""
TOKENS, COUNT = 50, len(BORDERS) - 1
MECHANISMS = ("linear", "mlstm", "differential(ccq(gla))", "lucid", "path", "softmax[window=4]")
Q, K, V = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))


def inputs_of(m, b=1, t=TOKENS):
    return make_inputs(m, CallLayout("test", b=b, t=t, s=t), "random")


def assert_row(cache, i, alone):
    """Row i of a cache is the cache of one sequence, up to the rounding of another batch."""
    assert cache.length[i] == alone.length[0]
    for name, buffer in cache.store.items():
        np.testing.assert_allclose(buffer[i], alone.store[name][0], atol=1e-12, err_msg=name)


@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_packed_extension_is_that_of_each_sequence_alone(expression):
    m = pa.parse(expression)
    x = inputs_of(m)
    cache = m.init_cache(**x, capacity=80, sequences=COUNT)
    outputs = []
    for donate in (False, True):
        out, cache = m.extend(cache, **x, cu_seqlens=BORDERS, donate=donate)
        outputs.append(out)
    np.testing.assert_allclose(outputs[0], m(**x, cu_seqlens=BORDERS), atol=1e-12)
    assert not outputs[1][:, BORDERS[-1] :].any()
    for i in range(COUNT):
        own, alone = slice_tokens(m, x, *BORDERS[i : i + 2]), m.init_cache(**x, capacity=80)
        for out in outputs:
            expected, alone = m.extend(alone, **own)
            tokens = out[:, BORDERS[i] : BORDERS[i + 1]]
            np.testing.assert_allclose(tokens, expected, atol=1e-12)
        assert_row(cache, i, alone)


def test_segment_ids_pack_sequences_in_several_rows():
    m = pa.parse("gla")
    x = inputs_of(m, b=2, t=6)
    ids = np.asarray([[0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 2]])
    out, cache = m.extend(m.init_cache(**x, sequences=4), **x, segment_ids=ids)
    np.testing.assert_allclose(out, m(**x, segment_ids=ids), atol=1e-12)
    assert cache.length.tolist() == [2, 4, 5, 1]
    last = {name: a[1:, 5:] for name, a in x.items()}
    assert_row(cache, 3, m.extend(m.init_cache(**last), **last)[1])


@pytest.mark.parametrize("expression", ["gla", "lucid"])
def test_masked_keys_are_masked_later_too(expression):
    m = pa.parse(expression)
    x = inputs_of(m, t=6)
    mask = np.asarray([[True, False, True, True, True, False]])
    cache = m.init_cache(**x, capacity=12, key_mask=True, sequences=2)
    for _ in range(2):
        out, cache = m.extend(cache, **x, cu_seqlens=[0, 2, 6], key_mask=mask)
    alone = m.init_cache(**x, capacity=12, key_mask=True)
    own = slice_tokens(m, x, 2, 6)
    for _ in range(2):
        expected, alone = m.extend(alone, **own, key_mask=mask[:, 2:])
    np.testing.assert_allclose(out[:, 2:], expected, atol=1e-12)
    assert_row(cache, 1, alone)


def test_gradients_pass_through_the_state_of_each_sequence():
    m = pa.parse("differential(gla)")
    x, rng = inputs_of(m), np.random.default_rng(1)
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
    pytest.importorskip(library)
    lib, m = libraries.named(library), pa.parse("gla")
    x = inputs_of(m, t=20)
    borders = [0, 18, 20]
    _, _, pull = m.extend_vjp(m.init_cache(**x, sequences=2), **x, cu_seqlens=borders)
    expected, _ = pull(np.ones_like(x["q"][..., : x["v"].shape[-1]]))

    def total(k, v):
        inputs = {**arrays, "k": k, "v": v}
        out, _ = m.extend(m.init_cache(**inputs, sequences=2), **inputs, cu_seqlens=borders)
        return out.sum()

    arrays = {name: lib.array(a, "float64") for name, a in x.items()}
    if library == "jax":
        import jax

        found = jax.jit(jax.grad(total, argnums=(0, 1)))(arrays["k"], arrays["v"])
    else:
        k, v = (arrays[name].requires_grad_() for name in "kv")
        total(k, v).backward()
        found = k.grad, v.grad
    for name, gradient in zip("kv", found, strict=True):
        np.testing.assert_allclose(np.asarray(gradient), expected[name], atol=1e-12)


def test_no_tokens_leave_the_cache_as_it_is():
    empty = Q[:, :0], K[:, :0], V[:, :0]
    linear = pa.Linear()
    cache = linear.init_cache(Q, K, V, sequences=2, states={"S": np.ones((2, 2, 4, 4))})
    out, after = linear.extend(cache, *empty, cu_seqlens=[0, 0, 0])
    assert out.shape == (1, 0, 2, 4)
    np.testing.assert_array_equal(after.states["S"], cache.states["S"])


def test_a_compiled_packed_extension_is_the_same():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.tensor, (Q, K, V))
    linear = pa.Linear()
    cache = linear.init_cache(q, k, v, sequences=2)

    def packed(q, k, v, cache):
        out, cache = linear.extend(cache, q, k, v, cu_seqlens=[0, 1, 6])
        return out, cache.states["S"]

    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    for left, right in zip(packed(q, k, v, cache), compiled(q, k, v, cache), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def both(**more):
    return {"cu_seqlens": [0, 1, 2, 6], **more}


LUCID, BIASED = pa.Lucid(), pa.Softmax(bias=True)
NO_IDS = np.zeros((1, 6), int)
BAD = {
    "count": (
        {"cu_seqlens": [0, 3, 6]},
        pa.ShapeError,
        "found 2 packed sequences, and 3 in the cache; init_cache(..., sequences=2) makes one",
    ),
    "lengths": (
        both(lengths=[6]),
        ValueError,
        "lengths of packed sequences are those between their borders; leave lengths out",
    ),
    "both": (both(segment_ids=NO_IDS), ValueError, "segment_ids and cu_seqlens mean the same"),
    "borders": ({"cu_seqlens": [0, 4, 2, 6]}, ValueError, "cu_seqlens must not decrease"),
    "ids": ({"segment_ids": NO_IDS[:, 1:]}, pa.ShapeError, "segment_ids is declared (b s)"),
    "capacity": (
        {"cu_seqlens": [0, 1, 1, 6]},
        ValueError,
        "capacity exceeded: the cache holds at most 4 tokens, and the new ones do not fit "
        "(sequence 2 of the packed ones)",
    ),
    "bias": (
        both(bias=np.zeros((1, 1, 6, 4))),
        ValueError,
        "bias (1|b 1|h t c) can not be divided among packed",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_borders_of_an_extension_are_refused(case):
    masks, error, text = BAD[case]
    m = BIASED if case == "bias" else LUCID
    cache = m.init_cache(Q, K, V, capacity=4, sequences=3)
    with pytest.raises(error, match=f"^{re.escape(str(m))}: .*{re.escape(text)}"):
        m.extend(cache, Q, K, V, **masks)


def test_traced_borders_are_refused():
    jax = pytest.importorskip("jax")
    linear, x = pa.Linear(), [jax.numpy.asarray(a) for a in (Q, K, V)]
    cache = linear.init_cache(*x, sequences=2)
    with pytest.raises(TypeError, match="cu_seqlens of extend has to be read, and is traced here"):
        jax.jit(lambda cu: linear.extend(cache, *x, cu_seqlens=cu))(jax.numpy.asarray([0, 2, 6]))
