"""Caches, extensions and cotangents that do not match the call are refused."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from tests.core.bad_input import (
    ARRAY,
    BIASED,
    FREE,
    LUCID,
    ONE_DTYPE,
    SOFTMAX,
    K,
    Q,
    V,
    by_explain_extend,
    by_extend,
    cache_for,
    case,
    f32,
    refuses,
)
from tests.core.bad_tensors import TK, TQ, TV


def filled(lengths=None, mechanism=SOFTMAX, capacity=8):
    return mechanism.extend(cache_for(mechanism, capacity), Q, K, V, lengths=lengths)[1]


every_extension = pytest.mark.parametrize("verb", [by_extend, by_explain_extend])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        pytest.param(
            lambda o: o[:1],
            ValueError,
            "the cotangent must have the output's shape (2, 4, 2, 3) and dtype float64; found "
            "(1, 4, 2, 3) and float64",
            id="shape",
        ),
        pytest.param(f32, ValueError, "found (2, 4, 2, 3) and float32", id="dtype"),
        pytest.param(
            torch.asarray,
            TypeError,
            "the cotangent must be an array of numpy, as the output; found Tensor",
            id="library",
        ),
        pytest.param(np.ndarray.tolist, TypeError, "as the output; found list", id="list"),
        pytest.param(lambda _: None, TypeError, "as the output; found NoneType", id="none"),
        pytest.param(lambda _: 1.0, TypeError, "as the output; found float", id="number"),
    ],
)
def test_a_cotangent_unlike_the_output_is_refused(change, error, text):
    out, pullback = LUCID.vjp(Q, K, V)
    refuses(lambda: pullback(change(out)), error, text)


def spent(mechanism=SOFTMAX):
    cache = cache_for(mechanism)
    mechanism.extend(cache, Q, K, V, donate=True)
    return cache


def as_torch(cache):
    return {name: torch.asarray(buffer) for name, buffer in cache.store.items()}


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize(
    ("mechanism", "make", "arrays", "error", "text"),
    [
        pytest.param(
            SOFTMAX,
            dict,
            (Q, K, V),
            TypeError,
            "softmax: the first argument of extend must be a Cache from init_cache; found dict",
            id="a-dict",
        ),
        pytest.param(
            SOFTMAX,
            lambda: tuple(cache_for()),
            (Q, K, V),
            TypeError,
            "softmax: the first argument of extend must be a Cache from init_cache; found tuple",
            id="a-tuple",
        ),
        pytest.param(
            SOFTMAX,
            lambda: Q,
            (K, V),
            TypeError,
            "softmax: the first argument of extend must be a Cache from init_cache; found ndarray",
            id="forgotten",
        ),
        pytest.param(
            LUCID,
            cache_for,
            (Q, K, V),
            ValueError,
            "lucid: the cache is of another mechanism: it has the buffers ['k', 'v'], and "
            "['k', 'rms(k)', 'y'] are needed",
            id="of-softmax",
        ),
        pytest.param(
            SOFTMAX,
            lambda: cache_for(LUCID),
            (Q, K, V),
            ValueError,
            "softmax: the cache is of another mechanism: it has the buffers ['k', 'rms(k)', 'y'], "
            "and ['k', 'v'] are needed",
            id="of-lucid",
        ),
        pytest.param(
            SOFTMAX,
            spent,
            (Q, K, V),
            ValueError,
            "softmax: this cache was donated by extend(..., donate=True) and can not be used again",
            id="spent",
        ),
        pytest.param(
            LUCID,
            lambda: spent(LUCID),
            (Q, K, V),
            ValueError,
            "lucid: this cache was donated by extend(..., donate=True) and can not be used again",
            id="spent-by-lucid",
        ),
        pytest.param(
            SOFTMAX,
            lambda: cache_for(capacity=3),
            (Q, K, V),
            ValueError,
            "softmax: capacity exceeded: the cache holds at most 3 tokens, and the new ones "
            "do not fit "
            "(sequence 0 of the batch)",
            id="full-at-once",
        ),
        pytest.param(
            SOFTMAX,
            lambda: filled([1, 4], capacity=6),
            (Q, K, V),
            ValueError,
            "softmax: capacity exceeded: the cache holds at most 6 tokens, and the new ones "
            "do not fit "
            "(sequence 1 of the batch)",
            id="full-in-one-sequence",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (Q[:1], K[:1], V[:1]),
            pa.ShapeError,
            "softmax: q is declared (b t h d), found shape (1, 4, 2, 3): axis 0 (b) is 1, but 2 in "
            "the cache",
            id="other-batch",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (Q[..., :2], K[..., :2], V),
            pa.ShapeError,
            "softmax: the cache's 'k' has shape (2, 8, 2, 3); these inputs need (2, 8, 2, 2)",
            id="other-key-width",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (Q, K, V[..., :2]),
            pa.ShapeError,
            "softmax: the cache's 'v' has shape (2, 8, 2, 3); these inputs need (2, 8, 2, 2)",
            id="other-value-width",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (Q, K[:, :, :1], V[:, :, :1]),
            pa.ShapeError,
            "softmax: the cache's 'k' has shape (2, 8, 2, 3); these inputs need (2, 8, 1, 3)",
            id="other-heads",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (Q, K[:, :2], V[:, :2]),
            pa.ShapeError,
            "softmax: k is declared (b t n d), found shape (2, 2, 2, 3): axis 1 (t) is 2, but 4 in "
            "q",
            id="fewer-new-keys-than-queries",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (TQ, TK, TV),
            TypeError,
            "softmax: the cache's 'length' is an array of numpy; the inputs are of torch",
            id="other-library",
        ),
        pytest.param(
            SOFTMAX,
            lambda: pa.Cache(cache_for().length, as_torch(cache_for())),
            (Q, K, V),
            TypeError,
            "softmax: the cache's 'k' is an array of torch; the inputs are of numpy",
            id="buffers-of-another-library",
        ),
        pytest.param(
            SOFTMAX,
            lambda: SOFTMAX.init_cache(f32(Q), f32(K), f32(V), capacity=8),
            (Q, K, V),
            TypeError,
            "softmax: the cache's 'k' has dtype float32; these inputs need float64",
            id="narrower-dtype",
        ),
        pytest.param(
            SOFTMAX,
            cache_for,
            (f32(Q), f32(K), f32(V)),
            TypeError,
            "softmax: the cache's 'k' has dtype float64; these inputs need float32",
            id="wider-dtype",
        ),
        pytest.param(
            SOFTMAX,
            lambda: SOFTMAX.init_cache(*(a.to("meta") for a in (TQ, TK, TV)), capacity=8),
            (TQ, TK, TV),
            ValueError,
            "softmax: the cache's 'length' is on meta; the inputs are on cpu",
            id="other-device",
        ),
        pytest.param(
            FREE,
            cache_for,
            (Q, K, V),
            ValueError,
            "softmax[causal=false]: is not causal, so it can not have a cache",
            id="not-causal",
        ),
    ],
)
def test_extend_refuses_a_cache_that_does_not_match_the_call(
    mechanism, make, arrays, error, text, donate
):
    cache = make()
    refuses(lambda: mechanism.extend(cache, *arrays, donate=donate), error, text)


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        *(
            case(
                f"capacity {v!r}",
                f"softmax: capacity must be a whole number, 1 or above; found {v!r}",
                partial(cache_for, capacity=v),
            )
            for v in (0, -1, True, 1.5, 8.0, "8")
        ),
        case(
            "not causal",
            "softmax[causal=false]: is not causal, so it can not have a cache",
            lambda: FREE.init_cache(Q, K, V, capacity=8),
        ),
        case(
            "without v",
            "softmax: init_cache can not infer the size of e from these inputs; pass v too",
            lambda: SOFTMAX.init_cache(Q, K, capacity=8),
            pa.ShapeError,
        ),
        case(
            "without inputs",
            "softmax: init_cache needs the inputs, for their shapes and dtype",
            lambda: SOFTMAX.init_cache(capacity=8),
            TypeError,
        ),
        case(
            "without capacity",
            "softmax: missing capacity, the greatest number of tokens per sequence",
            lambda: SOFTMAX.init_cache(Q, K, V),
            TypeError,
        ),
        case(
            "list",
            f"softmax: q {ARRAY} list",
            lambda: SOFTMAX.init_cache(Q.tolist(), K, V, capacity=8),
            TypeError,
        ),
        case(
            "dtypes",
            ONE_DTYPE,
            lambda: SOFTMAX.init_cache(f32(Q), K, V, capacity=8),
            TypeError,
        ),
        case(
            "batch",
            "softmax: k is declared (b t n d), found shape (1, 4, 2, 3): "
            "axis 0 (b) is 1, but 2 in q",
            lambda: SOFTMAX.init_cache(Q, K[:1], V, capacity=8),
            pa.ShapeError,
        ),
        case(
            "unknown keyword",
            "softmax: unknown keyword 'dtype'; softmax takes q, k, v",
            lambda: SOFTMAX.init_cache(Q, K, V, capacity=8, dtype="float32"),
            TypeError,
        ),
        case(
            "mask in place of the flag",
            "softmax: key_mask must be true or false",
            lambda: cache_for(key_mask=np.ones((2, 4), bool)),
            TypeError,
        ),
    ],
)
def test_init_cache_refuses_arguments_without_the_sizes_that_it_needs(run, error, text):
    refuses(run, error, text)


def test_init_cache_does_not_suggest_the_keyword_it_has_just_refused():
    with pytest.raises(TypeError, match="unknown keyword 'lengths'") as caught:
        cache_for(lengths=[1, 2])
    assert "did you mean 'lengths'" not in str(caught.value)


@every_extension
def test_an_extension_refuses_a_key_mask_that_its_cache_does_not_keep(verb):
    text = "softmax: this cache stores no key_mask; create it with init_cache(..., key_mask=True)"
    refuses(lambda: verb(SOFTMAX, Q, K, V, key_mask=np.ones((2, 4), bool)), ValueError, text)


def test_an_extension_refuses_a_key_mask_of_the_capacity():
    text = "softmax: key_mask is declared (b t), that is (2, 4); found (2, 8)"
    cache, mask = cache_for(key_mask=True), np.ones((2, 8), bool)
    refuses(lambda: SOFTMAX.extend(cache, Q, K, V, key_mask=mask), pa.ShapeError, text)


def test_an_extension_refuses_a_bias_that_does_not_span_the_capacity():
    text = (
        "softmax[bias=true]: bias is declared (1|b 1|h t c), found shape (1, 1, 4, 4): "
        "axis 3 (c) is 4, but 8 in the cache"
    )
    bias = np.zeros((1, 1, 4, 4))
    refuses(lambda: by_extend(BIASED, Q, K, V, bias=bias), pa.ShapeError, text)


DONATED = (
    "softmax: donate=True writes in place, so the call can not be differentiated; call it under "
    "torch.no_grad(), or without donate"
)


def test_donating_under_autograd_is_refused():
    q, k, v = (a.clone().requires_grad_() for a in (TQ, TK, TV))
    cache = SOFTMAX.init_cache(q, k, v, capacity=8)
    refuses(lambda: SOFTMAX.extend(cache, q, k, v, donate=True), ValueError, DONATED)
    assert set(cache.store) == {"k", "v"}
    with torch.no_grad():
        SOFTMAX.extend(cache, q, k, v, donate=True)


def test_donating_a_cache_that_autograd_needs_is_refused():
    past = [a.clone().requires_grad_() for a in (TQ, TK, TV)]
    _, cache = SOFTMAX.extend(SOFTMAX.init_cache(*past, capacity=8), *past)
    refuses(lambda: SOFTMAX.extend(cache, TQ, TK, TV, donate=True), ValueError, DONATED)


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [
        (np.asarray([-3, 0], np.int32), ValueError, "the cache's length is negative"),
        (np.zeros(2), TypeError, "must be integers of shape .* found float64"),
        (np.zeros((2, 1), np.int32), TypeError, "must be integers of shape .* found int32 of"),
    ],
)
def test_a_cache_with_invalid_lengths_is_refused(length, error, text):
    m, q = pa.Softmax(), np.ones((2, 1, 2, 4))
    cache = m.init_cache(q, q, q, capacity=4)._replace(length=length)
    with pytest.raises(error, match=text):
        m.extend(cache, q, q, q)


def test_donate_must_be_true_or_false():
    m, q = pa.Softmax(), np.ones((2, 1, 2, 4))
    with pytest.raises(TypeError, match="donate must be true or false; found 'no'"):
        m.extend(m.init_cache(q, q, q, capacity=4), q, q, q, donate="no")
