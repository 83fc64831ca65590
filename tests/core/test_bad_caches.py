"""Caches, extensions and cotangents that do not match the call are refused."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.bad_input import (
    ARRAY,
    BIASED,
    EXTENDING,
    FREE,
    LUCID,
    ONE_DTYPE,
    SOFTMAX,
    K,
    Q,
    V,
    cache_for,
    f32,
    refuses,
)

OUTPUT = "the cotangent must have the output's shape (2, 4, 2, 3) and dtype float64; found "


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda o: o[:1], ValueError, f"{OUTPUT}(1, 4, 2, 3) and float64"),
        (f32, ValueError, f"{OUTPUT}(2, 4, 2, 3) and float32"),
        (np.ndarray.tolist, TypeError, "must be an array of numpy, as the output; found list"),
        (lambda _: 1.0, TypeError, "as the output; found float"),
    ],
)
def test_a_cotangent_unlike_the_output_is_refused(change, error, text):
    out, pullback = LUCID.vjp(Q, K, V)
    refuses(lambda: pullback(change(out)), error, text)


def spent():
    cache = cache_for()
    SOFTMAX.extend(cache, Q, K, V, donate=True)
    return cache


def filled(lengths, capacity):
    return SOFTMAX.extend(cache_for(capacity=capacity), Q, K, V, lengths=lengths)[1]


def of_length(length):
    return cache_for()._replace(length=length)


def narrow():
    return SOFTMAX.init_cache(f32(Q), f32(K), f32(V), capacity=8)


QKV, SHAPE = (Q, K, V), pa.ShapeError
FIRST = "softmax: the first argument of extend must be a Cache from init_cache; found"
OTHER = (
    "lucid: the cache is of another mechanism: it has the buffers ['k', 'v'], and ['k', 'rms(k)',"
)
DONATED = "softmax: this cache was donated by extend(..., donate=True) and can not be used again"
NEED = "softmax: the cache's 'k' has shape (2, 8, 2, 3); these inputs need"
AT_MOST = "softmax: capacity exceeded: the cache holds at most"
BATCH = "found shape (1, 4, 2, 3): axis 0 (b) is 1, but 2 in the cache"
TIME = "k is declared (b t n d), found shape (2, 2, 2, 3): axis 1 (t) is 2, but 4 in q"
DTYPE = "softmax: the cache's 'k' has dtype float32; these inputs need float64"
NOT_CAUSAL = "softmax[causal=false]: is not causal, so it can not have a cache"
NEGATIVE, WRONG = np.asarray([-3, 0], np.int32), np.zeros((2, 1), np.int32)
OF_INTEGERS = "must be integers of shape (b); found"
CACHES = [
    (SOFTMAX, dict, QKV, TypeError, f"{FIRST} dict"),
    (SOFTMAX, lambda: Q, (K, V), TypeError, f"{FIRST} ndarray"),
    (LUCID, cache_for, QKV, ValueError, OTHER),
    (SOFTMAX, spent, QKV, ValueError, DONATED),
    (SOFTMAX, lambda: cache_for(capacity=3), QKV, ValueError, f"{AT_MOST} 3 tokens"),
    (SOFTMAX, lambda: filled([1, 4], 6), QKV, ValueError, "not fit (sequence 1 of the batch)"),
    (SOFTMAX, cache_for, (Q[:1], K[:1], V[:1]), SHAPE, BATCH),
    (SOFTMAX, cache_for, (Q[..., :2], K[..., :2], V), SHAPE, f"{NEED} (2, 8, 2, 2)"),
    (SOFTMAX, cache_for, (Q, K[:, :, :1], V[:, :, :1]), SHAPE, f"{NEED} (2, 8, 1, 3)"),
    (SOFTMAX, cache_for, (Q, K[:, :2], V[:, :2]), SHAPE, TIME),
    (SOFTMAX, narrow, QKV, TypeError, DTYPE),
    (FREE, cache_for, QKV, ValueError, NOT_CAUSAL),
    (SOFTMAX, lambda: of_length(NEGATIVE), QKV, ValueError, "the cache's length is negative"),
    (SOFTMAX, lambda: of_length(np.zeros(2)), QKV, TypeError, f"{OF_INTEGERS} float64"),
    (SOFTMAX, lambda: of_length(WRONG), QKV, TypeError, f"{OF_INTEGERS} int32 of"),
]


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize(("mechanism", "make", "arrays", "error", "text"), CACHES)
def test_extend_refuses_a_cache_that_does_not_match_the_call(
    mechanism, make, arrays, error, text, donate
):
    cache = make()
    refuses(lambda: mechanism.extend(cache, *arrays, donate=donate), error, text)


def test_donate_must_be_true_or_false():
    text = "donate must be true or false; found 'no'"
    refuses(lambda: SOFTMAX.extend(cache_for(), Q, K, V, donate="no"), TypeError, text)


def test_a_cache_of_another_library_or_device_is_refused():
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(a) for a in QKV]
    mixed = pa.Cache(
        cache_for().length, {n: torch.asarray(a) for n, a in cache_for().store.items()}
    )
    elsewhere = SOFTMAX.init_cache(*(a.to("meta") for a in tensors), capacity=8)
    out, pullback = LUCID.vjp(*QKV)
    for run, error, text in (
        (lambda: SOFTMAX.extend(cache_for(), *tensors), TypeError, "'length' is an array of numpy"),
        (lambda: SOFTMAX.extend(mixed, *QKV), TypeError, "the cache's 'k' is an array of torch"),
        (
            lambda: SOFTMAX.extend(elsewhere, *tensors),
            ValueError,
            "the cache's 'length' is on meta",
        ),
        (lambda: pullback(torch.asarray(out)), TypeError, "must be an array of numpy, as the"),
    ):
        refuses(run, error, text)


CAPACITY = "softmax: capacity must be a whole number, 1 or above; found "
GATED = pa.Softmax(forget="unscaled")
CREATED = [
    *((SOFTMAX, {"capacity": v}, ValueError, f"{CAPACITY}{v!r}") for v in (0, True, 8.0, "8")),
    (FREE, {}, ValueError, NOT_CAUSAL),
    (SOFTMAX, {"v": None}, SHAPE, "can not infer the size of e from these inputs; pass v too"),
    (GATED, {"q": None}, SHAPE, "can not infer the size of h from these inputs; pass q, g too"),
    (SOFTMAX, dict.fromkeys("qkv"), TypeError, "needs the inputs, for their shapes and dtype"),
    (SOFTMAX, {"capacity": None}, TypeError, "missing capacity, the greatest number of tokens"),
    (SOFTMAX, {"q": Q.tolist()}, TypeError, f"softmax: q {ARRAY} list"),
    (SOFTMAX, {"q": f32(Q)}, TypeError, ONE_DTYPE),
    (SOFTMAX, {"k": K[:1]}, SHAPE, "found shape (1, 4, 2, 3): axis 0 (b) is 1, but 2 in q"),
    (SOFTMAX, {"lengths": [1, 2]}, TypeError, "keyword 'lengths'; softmax takes q, k, v"),
    (SOFTMAX, {"key_mask": Q > 0}, TypeError, "softmax: key_mask must be true or false"),
]


@pytest.mark.parametrize(("mechanism", "changes", "error", "text"), CREATED)
def test_init_cache_refuses_arguments_without_the_sizes_that_it_needs(
    mechanism, changes, error, text
):
    given = {"q": Q, "k": K, "v": V, "capacity": 8} | changes
    given = {name: x for name, x in given.items() if x is not None}
    refuses(lambda: mechanism.init_cache(**given), error, text)


def test_an_extension_refuses_masks_and_pairs_that_do_not_fit_its_cache():
    text = "softmax: this cache stores no key_mask; create it with init_cache(..., key_mask=True)"
    few = np.ones((2, 4), bool)
    for verb in EXTENDING:
        refuses(lambda verb=verb: verb(SOFTMAX, Q, K, V, key_mask=few), ValueError, text)
    text = "softmax: key_mask is declared (b t), that is (2, 4); found (2, 8)"
    cache, mask = cache_for(key_mask=True), np.ones((2, 8), bool)
    refuses(lambda: SOFTMAX.extend(cache, Q, K, V, key_mask=mask), SHAPE, text)
    text = (
        "softmax[bias=true]: bias is declared (1|b 1|h t c), found shape (1, 1, 4, 4): "
        "axis 3 (c) is 4, but 8 in the cache"
    )
    bias = np.zeros((1, 1, 4, 4))
    refuses(lambda: EXTENDING[0](BIASED, Q, K, V, bias=bias), SHAPE, text)


def test_a_gradient_through_a_cache_of_tokens_is_refused():
    text = "softmax: extend_vjp needs a cache of states, and this cache stores tokens; use vjp of a"
    for verb in (SOFTMAX.extend_vjp, lambda *x: SOFTMAX.explain(*x[1:], cache=x[0], verb="vjp")):
        refuses(lambda verb=verb: verb(cache_for(), Q, K, V), TypeError, text)


def test_donating_what_autograd_needs_is_refused():
    torch = pytest.importorskip("torch")
    text = (
        "softmax: donate=True writes in place, so the call can not be differentiated; call it "
        "under torch.no_grad(), or without donate"
    )
    tensors = [torch.tensor(a) for a in QKV]
    x = [a.clone().requires_grad_() for a in tensors]
    cache = SOFTMAX.init_cache(*x, capacity=8)
    refuses(lambda: SOFTMAX.extend(cache, *x, donate=True), ValueError, text)
    assert set(cache.store) == {"k", "v"}
    _, after = SOFTMAX.extend(cache, *x)
    refuses(lambda: SOFTMAX.extend(after, *tensors, donate=True), ValueError, text)
    with torch.no_grad():
        SOFTMAX.extend(cache, *x, donate=True)


def test_a_cache_with_another_flush_interval_is_refused():
    eager, lazy, lazier = pa.Path(), pa.Path(flush=2), pa.Path(flush=3)
    x = make_inputs(eager, CallLayout("test", t=4, s=4, h=4, n=2, d=3, e=2), "random")
    with pytest.raises(ValueError, match="the cache is of another mechanism"):
        lazy.extend(eager.init_cache(**x, capacity=8), **x)
    with pytest.raises(SHAPE, match=r"pending\(w\)' has shape \(2, 3, 2, 3\)"):
        lazy.extend(lazier.init_cache(**x, capacity=8), **x)
    assert lazy.init_cache(**x, capacity=8).store["pending(w)"].shape == (2, 2, 2, 3)


def test_arguments_are_checked_again_when_their_type_changes():
    cache = cache_for(LUCID)
    LUCID.extend(cache, Q, K, V)
    for arrays, kept, error, text in (
        ((f32(Q), K, V), cache, TypeError, "one dtype"),
        ((Q, K.tolist(), V), cache, TypeError, "k must be an array"),
        (QKV, cache._replace(store={}), ValueError, "can not be used again"),
    ):
        refuses(lambda a=arrays, c=kept: LUCID.extend(c, *a), error, text)
