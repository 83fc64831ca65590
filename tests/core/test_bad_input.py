"""Bad input is refused before any work, by an error whose text names what is wrong.

What only values could show can not be refused when they are traced: then the sequences concerned
come out as NaN, and the others as if nothing were wrong.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn_conformance.inputs import Layout, make_inputs

SOFTMAX, LUCID, BIASED = pa.Softmax(), pa.Lucid(), pa.Softmax(bias=True)
FREE = pa.Softmax(causal=False)
Q, K, V = np.random.default_rng(0).normal(size=(3, 2, 4, 2, 3))
TQ, TK, TV = (torch.asarray(a.copy()) for a in (Q, K, V))
for _array in (Q, K, V):
    _array.flags.writeable = False

REAL = "must be of dtype float16, bfloat16, float32 or float64; found"
ARRAY = "must be an array of NumPy, PyTorch, JAX, CuPy or another array-API library; found"
ONE_DTYPE = (
    "softmax: inputs of one dtype expected (beside half-precision queries, keys and "
    "values, gates and the like may be float32); found "
)


def case(name, text, run, error=ValueError):
    """One bad input: what it is, what the error says, and how it is tried."""
    return pytest.param(run, error, text, id=name.replace(" ", "-"))


def refuses(run, error, text):
    with pytest.raises(error, match=re.escape(text)) as caught:
        run()
    assert isinstance(caught.value, TypeError | ValueError)


def f32(array):
    return array.astype(np.float32)


def cache_for(mechanism=SOFTMAX, capacity=8, **named):
    return mechanism.init_cache(Q, K, V, capacity=capacity, **named)


def filled(lengths=None, mechanism=SOFTMAX, capacity=8):
    return mechanism.extend(cache_for(mechanism, capacity), Q, K, V, lengths=lengths)[1]


def by_call(mechanism, *arrays, **named):
    return mechanism(*arrays, **named)


def by_vjp(mechanism, *arrays, **named):
    return mechanism.vjp(*arrays, **named)


def by_explain(mechanism, *arrays, **named):
    return mechanism.explain(*arrays, **named)


def by_extend(mechanism, *arrays, **named):
    return mechanism.extend(cache_for(mechanism), *arrays, **named)


def by_explain_extend(mechanism, *arrays, **named):
    return mechanism.explain(*arrays, cache=cache_for(mechanism), **named)


every_verb = pytest.mark.parametrize(
    "verb", [by_call, by_vjp, by_explain, by_extend, by_explain_extend]
)
every_full_call = pytest.mark.parametrize("verb", [by_call, by_vjp, by_explain])
every_extension = pytest.mark.parametrize("verb", [by_extend, by_explain_extend])


def inputs_case(name, text, arrays, error, mechanism=SOFTMAX, **named):
    return pytest.param(mechanism, arrays, named, error, text, id=name.replace(" ", "-"))


@every_verb
@pytest.mark.parametrize(
    ("mechanism", "arrays", "named", "error", "text"),
    [
        inputs_case(
            "near keyword",
            "softmax: unknown keyword 'length' (did you mean 'lengths'?); softmax takes q, k, v",
            (Q, K, V),
            TypeError,
            length=[1, 2],
        ),
        inputs_case(
            "near input",
            "softmax[bias=true]: unknown keyword 'biass' (did you mean 'bias'?); "
            "softmax[bias=true] takes q, k, v, bias",
            (Q, K, V),
            TypeError,
            BIASED,
            biass=Q,
        ),
        inputs_case(
            "keyword near nothing",
            "softmax: unknown keyword 'xyz'; softmax takes q, k, v",
            (Q, K, V),
            TypeError,
            xyz=1,
        ),
        inputs_case(
            "input of an option that is off",
            "lucid: unknown keyword 'lucid_beta'; lucid takes q, k, v",
            (Q, K, V),
            TypeError,
            LUCID,
            lucid_beta=Q[..., 0],
        ),
        inputs_case("two missing", "softmax: missing k, v; softmax takes q, k, v", (Q,), TypeError),
        inputs_case(
            "optional input missing",
            "lucid[beta=true]: missing lucid_beta; lucid[beta=true] takes q, k, v, lucid_beta",
            (Q, K, V),
            TypeError,
            pa.Lucid(beta=True),
        ),
        inputs_case(
            "given twice",
            "softmax: v is given by position and by name",
            (Q, K, V),
            TypeError,
            v=V,
        ),
        inputs_case(
            "too many by position",
            "softmax takes q, k, v: at most 3 by position, the others by name; found 4 by position",
            (Q, K, V, Q),
            TypeError,
        ),
        inputs_case(
            "fourth by position",
            "at most 3 by position, the others by name; found 4 by position",
            (Q, K, V, Q),
            TypeError,
            BIASED,
        ),
        inputs_case("list", f"softmax: q {ARRAY} list", (Q.tolist(), K, V), TypeError),
        inputs_case("none", f"softmax: v {ARRAY} NoneType", (Q, K, None), TypeError),
        inputs_case(
            "dtypes",
            ONE_DTYPE + "{'q': 'float32', 'k': 'float64', 'v': 'float64'}",
            (f32(Q), K, V),
            TypeError,
        ),
        inputs_case(
            "float32 keys beside half precision",
            ONE_DTYPE + "{'q': 'float16', 'k': 'float32', 'v': 'float16'}",
            (Q.astype(np.float16), f32(K), V.astype(np.float16)),
            TypeError,
        ),
        inputs_case("integers", f"softmax: q {REAL} int64", (Q.astype(int), K, V), TypeError),
        inputs_case("booleans", f"softmax: q {REAL} bool", (Q > 0, K, V), TypeError),
        inputs_case("complex", f"softmax: k {REAL} complex128", (Q, K * 1j, V), TypeError),
        inputs_case("objects", f"softmax: v {REAL} object", (Q, K, V.astype(object)), TypeError),
        inputs_case(
            "too few axes",
            "softmax: q is declared (b t h d), found shape (4, 2, 3): 4 axes expected, not 3",
            (Q[0], K, V),
            pa.ShapeError,
        ),
        inputs_case(
            "too many axes",
            "found shape (1, 2, 4, 2, 3): 4 axes expected, not 5",
            (Q, K, V[None]),
            pa.ShapeError,
        ),
        inputs_case(
            "scalar",
            "found shape (): 4 axes expected, not 0",
            (np.float64(1), K, V),
            pa.ShapeError,
        ),
        inputs_case(
            "empty time",
            "softmax: q is declared (b t h d), found shape (2, 0, 2, 3): axis 1 (t) is empty",
            (Q[:, :0], K[:, :0], V[:, :0]),
            pa.ShapeError,
        ),
        inputs_case(
            "empty batch",
            "softmax: q is declared (b t h d), found shape (0, 4, 2, 3): axis 0 (b) is empty",
            (Q[:0], K[:0], V[:0]),
            pa.ShapeError,
        ),
        inputs_case(
            "empty width",
            "softmax: q is declared (b t h d), found shape (2, 4, 2, 0): axis 3 (d) is empty",
            (Q[..., :0], K[..., :0], V),
            pa.ShapeError,
        ),
        inputs_case(
            "heads not divisible",
            "softmax: query heads (h = 3) must be a multiple of key/value heads (n = 2); found "
            "shapes {'q': (2, 4, 3, 3), 'k': (2, 4, 2, 3), 'v': (2, 4, 2, 3)}",
            (np.zeros((2, 4, 3, 3)), K, V),
            pa.ShapeError,
        ),
        inputs_case(
            "fewer query heads than key heads",
            "query heads (h = 1) must be a multiple of key/value heads (n = 2)",
            (Q[:, :, :1], K, V),
            pa.ShapeError,
        ),
        inputs_case(
            "bias that fits neither 1 nor b",
            "softmax[bias=true]: bias is declared (1|b 1|h t ",
            (Q, K, V),
            pa.ShapeError,
            BIASED,
            bias=np.zeros((3, 1, 4, 8)),
        ),
        inputs_case(
            "beta for other heads",
            "found shape (2, 4, 1): axis 2 (n) is 1, but 2 in k",
            (Q, K, V),
            pa.ShapeError,
            pa.Lucid(beta=True),
            lucid_beta=np.ones((2, 4, 1)),
        ),
    ],
)
def test_an_input_that_does_not_fit_its_declaration_is_refused_by_every_verb(
    verb, mechanism, arrays, named, error, text
):
    refuses(partial(verb, mechanism, *arrays, **named), error, text)


@every_full_call
@pytest.mark.parametrize(
    ("mechanism", "arrays", "named", "error", "text"),
    [
        inputs_case(
            "libraries",
            "softmax: inputs of one library expected; found "
            "{'q': 'numpy', 'k': 'torch', 'v': 'numpy'}",
            (Q, TK, V),
            TypeError,
        ),
        inputs_case(
            "devices",
            "softmax: inputs on one device expected; found {'q': 'cpu', 'k': 'meta', 'v': 'cpu'}",
            (TQ, TK.to("meta"), TV),
            ValueError,
        ),
        inputs_case(
            "width of keys",
            "softmax: k is declared (b s n d), found shape (2, 4, 2, 2): "
            "axis 3 (d) is 2, but 3 in q",
            (Q, K[..., :2], V),
            pa.ShapeError,
        ),
        inputs_case(
            "batch of keys",
            "softmax: k is declared (b s n d), found shape (1, 4, 2, 3): "
            "axis 0 (b) is 1, but 2 in q",
            (Q, K[:1], V),
            pa.ShapeError,
        ),
        inputs_case(
            "time of values",
            "softmax: v is declared (b s n e), found shape (2, 3, 2, 3): "
            "axis 1 (s) is 3, but 4 in k",
            (Q, K, V[:, :3]),
            pa.ShapeError,
        ),
        inputs_case(
            "heads of values",
            "softmax: v is declared (b s n e), found shape (2, 4, 1, 3): "
            "axis 2 (n) is 1, but 2 in k",
            (Q, K, V[:, :, :1]),
            pa.ShapeError,
        ),
        inputs_case(
            "bias of another batch",
            "softmax[bias=true]: bias is declared (1|b 1|h t s), found shape (3, 1, 4, 4): "
            "axis 0 (1|b) is 3, but 2 in q",
            (Q, K, V),
            pa.ShapeError,
            BIASED,
            bias=np.zeros((3, 1, 4, 4)),
        ),
        inputs_case(
            "more queries than keys",
            "softmax: is causal, so there must not be more queries than keys; "
            "found t = 4 and s = 2",
            (Q, K[:, :2], V[:, :2]),
            pa.ShapeError,
        ),
        inputs_case(
            "lengths where queries and keys share no positions",
            "softmax[causal=false]: lengths of a non-causal call needs as many queries as keys; "
            "found t = 2 and s = 4; use key_mask",
            (Q[:, :2], K, V),
            ValueError,
            FREE,
            lengths=[1, 2],
        ),
        inputs_case(
            "segments where queries and keys share no positions",
            "softmax[causal=false]: segment_ids of a non-causal call needs as many queries as "
            "keys; found t = 4 and s = 2; use key_mask",
            (Q, K[:, :2], V[:, :2]),
            ValueError,
            FREE,
            segment_ids=np.zeros((2, 2), int),
        ),
        inputs_case(
            "segments that return",
            "softmax: segment_ids must be contiguous: each id in one run (sequence 1 of the batch)",
            (Q, K, V),
            ValueError,
            segment_ids=np.asarray([[0, 0, 1, 1], [0, 1, 0, 1]]),
        ),
        inputs_case(
            "segments of another length",
            "softmax: segment_ids is declared (b s), that is (2, 4); found (2, 3)",
            (Q, K, V),
            pa.ShapeError,
            segment_ids=np.zeros((2, 3), int),
        ),
        inputs_case(
            "segments without batch",
            "softmax: segment_ids is declared (b s), that is (2, 4); found (4,)",
            (Q, K, V),
            pa.ShapeError,
            segment_ids=np.zeros(4, int),
        ),
        inputs_case(
            "segments of floats",
            "softmax: segment_ids must have an integer dtype; found float64",
            (Q, K, V),
            TypeError,
            segment_ids=np.zeros((2, 4)),
        ),
        inputs_case(
            "segments as a list",
            "softmax: segment_ids must be an array of numpy, as the inputs; found list",
            (Q, K, V),
            TypeError,
            segment_ids=[[0] * 4] * 2,
        ),
        inputs_case(
            "segments of another library",
            "softmax: segment_ids must be an array of numpy, as the inputs; found one of torch",
            (Q, K, V),
            TypeError,
            segment_ids=torch.zeros((2, 4), dtype=torch.int64),
        ),
    ],
)
def test_a_full_call_refuses_inputs_and_segments_that_contradict_each_other(
    verb, mechanism, arrays, named, error, text
):
    refuses(partial(verb, mechanism, *arrays, **named), error, text)


@every_verb
@pytest.mark.parametrize(
    ("lengths", "error", "text"),
    [
        pytest.param(
            [4, 5], ValueError, "lengths must lie between 0 and {} = 4 (sequence 1", id="beyond"
        ),
        pytest.param(
            [-1, 4], ValueError, "lengths must lie between 0 and {} = 4 (sequence 0", id="negative"
        ),
        pytest.param(
            np.asarray([1, 9]), ValueError, "lengths must lie between 0 and {} = 4", id="array"
        ),
        pytest.param(
            np.asarray([2**32 + 1, 2]),
            ValueError,
            "lengths must lie between 0 and {} = 4 (sequence 0 of the batch)",
            id="beyond-int32",
        ),
        pytest.param(
            np.asarray([2**64 - 2**32 + 1, 2], dtype=np.uint64),
            ValueError,
            "lengths must lie between 0 and {} = 4 (sequence 0 of the batch)",
            id="beyond-int64",
        ),
        pytest.param([2**40, 1], ValueError, "softmax: lengths must", id="list-beyond-int32"),
        pytest.param(
            [1.5, 2], TypeError, "lengths must be whole numbers; found [1.5, 2]", id="fractions"
        ),
        pytest.param(
            [2.0, 1.0], TypeError, "lengths must be whole numbers; found [2.0, 1.0]", id="floats"
        ),
        pytest.param(
            [True, 1], TypeError, "lengths must be whole numbers; found [True, 1]", id="boolean"
        ),
        pytest.param(
            np.asarray([1.0, 2.0]),
            TypeError,
            "lengths must have an integer dtype; found float64",
            id="float-array",
        ),
        pytest.param(
            np.asarray([True, False]),
            TypeError,
            "lengths must have an integer dtype; found bool",
            id="boolean-array",
        ),
        pytest.param(
            [1], pa.ShapeError, "lengths is declared (b), that is (2,); found (1,)", id="too-few"
        ),
        pytest.param(
            (1, 2, 3),
            pa.ShapeError,
            "lengths is declared (b), that is (2,); found (3,)",
            id="too-many",
        ),
        pytest.param(
            np.asarray([[1, 2]]),
            pa.ShapeError,
            "lengths is declared (b), that is (2,); found (1, 2)",
            id="two-axes",
        ),
        pytest.param(
            3, TypeError, "lengths must be an array of numpy, as the inputs; found int", id="number"
        ),
        pytest.param(
            torch.asarray([1, 2]),
            TypeError,
            "lengths must be an array of numpy, as the inputs; found one of torch",
            id="other-library",
        ),
    ],
)
def test_lengths_that_are_no_count_of_the_tokens_are_refused(verb, lengths, error, text):
    letter = "t" if verb in (by_extend, by_explain_extend) else "s"
    refuses(partial(verb, SOFTMAX, Q, K, V, lengths=lengths), error, text.format(letter))


@every_verb
@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        pytest.param(np.ones((2, 4)), TypeError, "bool; found float64", id="floats"),
        pytest.param(np.ones((2, 4), int), TypeError, "bool; found int64", id="integers"),
        pytest.param(
            np.ones((2, 3), bool), pa.ShapeError, "that is (2, 4); found (2, 3)", id="too-short"
        ),
        pytest.param(
            np.ones((1, 4), bool), pa.ShapeError, "that is (2, 4); found (1, 4)", id="broadcast"
        ),
        pytest.param(
            np.ones((2, 4, 1), bool),
            pa.ShapeError,
            "that is (2, 4); found (2, 4, 1)",
            id="three-axes",
        ),
        pytest.param(
            [[True] * 4] * 2,
            TypeError,
            "must be an array of numpy, as the inputs; found list",
            id="list",
        ),
        pytest.param(
            torch.ones((2, 4), dtype=torch.bool),
            TypeError,
            "must be an array of numpy, as the inputs; found one of torch",
            id="other-library",
        ),
    ],
)
def test_a_key_mask_of_another_kind_or_shape_is_refused(verb, mask, error, text):
    with pytest.raises(error, match="softmax: key_mask .*" + re.escape(text)):
        verb(SOFTMAX, Q, K, V, key_mask=mask)


def test_a_mask_on_another_device_is_refused():
    mask = torch.ones((2, 4), dtype=torch.bool, device="meta")
    text = "softmax: key_mask is on meta; the inputs are on cpu"
    refuses(lambda: SOFTMAX(TQ, TK, TV, key_mask=mask), ValueError, text)


SCALE = "option scale must be a finite number above 0, or None; found "
WINDOW = "option window must be a whole number, 1 or above, or None; found "
EPS = "option eps must be a finite number, 0 or above; found "
NORMALIZE = (
    "lucid: option normalize must be one of 'keys', 'queries_and_keys', 'rows', 'none'; found "
)


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        *(
            case(f"{cls.name} scale {value!r}", f"{cls.name}: {SCALE}{value!r}", partial(cls, **o))
            for cls in (pa.Softmax, pa.Lucid, pa.LucidSolve)
            for value in (0, 0.0, -1, float("nan"), float("inf"), -float("inf"), True, "1", 1j)
            for o in [{"scale": value}]
        ),
        case(
            "scale beyond floats",
            f"softmax: {SCALE}1000",
            lambda: pa.Softmax(scale=10**400),
        ),
        *(
            case(f"window {v!r}", f"softmax: {WINDOW}{v!r}", partial(pa.Softmax, window=v))
            for v in (0, -1, 1.5, 2.0, True, "3")
        ),
        *(
            case(f"eps {v!r}", f"{cls.name}: {EPS}{v!r}", partial(cls, eps=v))
            for cls in (pa.Lucid, pa.LucidSolve, pa.RMSNorm)
            for v in (-1e-9, float("nan"), float("inf"), None, False, "0")
        ),
        *(
            case(
                f"{name} {v!r}",
                f"softmax: option {name} must be true or false; found {v!r}",
                partial(pa.Softmax, **{name: v}),
            )
            for name in ("causal", "bias")
            for v in (1, 0, None, "true")
        ),
        case(
            "beta 1",
            "lucid: option beta must be true or false; found 1",
            lambda: pa.Lucid(beta=1),
        ),
        *(
            case(f"normalize {v!r}", f"{NORMALIZE}{v!r}", partial(pa.Lucid, normalize=v))
            for v in ("row", "given", None, True, [])
        ),
        case(
            "read of no name",
            "softmax: option read must be one of mean, log_mean_exp; found 'max'",
            lambda: pa.Softmax(read="max"),
        ),
        *(
            case(
                f"base {v!r}",
                f"lucid: base must be a mechanism; found {v!r}",
                partial(pa.Lucid, v),
                TypeError,
            )
            for v in ("softmax", None, pa.Softmax)
        ),
        *(
            case(
                f"beta with {v}",
                f"lucid: beta needs the unit diagonal, which normalize={v!r} has not",
                partial(pa.Lucid, beta=True, normalize=v),
            )
            for v in ("rows", "none")
        ),
        *(
            case(
                f"eps with {v}",
                f"lucid: eps belongs to a norm; normalize={v!r} has none",
                partial(pa.Lucid, eps=0, normalize=v),
            )
            for v in ("rows", "none")
        ),
        *(
            case(
                f"detach_max with {v}",
                f"lucid: detach_max belongs to normalize='rows'; found {v!r}",
                partial(pa.Lucid, detach_max=True, normalize=v),
            )
            for v in ("keys", "queries_and_keys", "none")
        ),
        case(
            "unknown option",
            "unexpected keyword argument 'windw'",
            lambda: pa.Softmax(windw=3),
            TypeError,
        ),
        case(
            "unknown option of a shorthand",
            "softmax: unknown keyword 'causl' (did you mean 'causal'?); options are causal, scale, "
            "window, bias, forget, read, inputs q, k, v, and segment_ids, lengths, key_mask, "
            "backend",
            lambda: pa.softmax(Q, K, V, causl=False),
            TypeError,
        ),
        case(
            "bad option of a shorthand",
            f"lucid: {EPS}-1",
            lambda: pa.lucid(Q, K, V, eps=-1),
        ),
        case(
            "base of a shorthand",
            "lucid is causal",
            lambda: pa.lucid(Q, K, V, causal=False),
            TypeError,
        ),
    ],
)
def test_an_option_out_of_its_range_is_refused_at_construction(run, error, text):
    refuses(run, error, text)


@pytest.mark.parametrize("order", [("beta", "lucid_beta"), ("lucid_beta", "beta")])
def test_a_shorthand_refuses_an_input_whose_option_is_switched_off_in_either_order(order):
    given = {"beta": False, "lucid_beta": np.ones((2, 4, 2))}
    with pytest.raises(TypeError, match="lucid_beta"):
        pa.lucid(Q, K, V, **{name: given[name] for name in order})


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
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
def test_a_cotangent_unlike_the_output_is_refused(spoil, error, text):
    out, pullback = LUCID.vjp(Q, K, V)
    refuses(lambda: pullback(spoil(out)), error, text)


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
def test_extend_refuses_a_cache_that_is_not_its_own(mechanism, make, arrays, error, text, donate):
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
def test_init_cache_refuses_what_tells_it_no_sizes(run, error, text):
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


def test_an_extension_refuses_segment_ids():
    text = "softmax: segment_ids belong to a full call; each sequence has a cache of its own"
    ids = np.zeros((2, 4), int)
    refuses(lambda: by_extend(SOFTMAX, Q, K, V, segment_ids=ids), TypeError, text)


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


def test_donating_a_cache_that_autograd_will_need_is_refused():
    past = [a.clone().requires_grad_() for a in (TQ, TK, TV)]
    _, cache = SOFTMAX.extend(SOFTMAX.init_cache(*past, capacity=8), *past)
    refuses(lambda: SOFTMAX.extend(cache, TQ, TK, TV, donate=True), ValueError, DONATED)


NAMES = "backend must be a name or a tuple of names; found "


@every_verb
@pytest.mark.parametrize(
    ("backend", "error", "text"),
    [
        ("tritn", ValueError, "unknown backend 'tritn'; known are "),
        ("", ValueError, "unknown backend ''; known are "),
        (("reference", "tritn"), ValueError, "unknown backend 'tritn'; known are "),
        ((), TypeError, f"{NAMES}()"),
        (("reference", 3), TypeError, f"{NAMES}('reference', 3)"),
        (3, TypeError, f"{NAMES}3"),
        (True, TypeError, f"{NAMES}True"),
        (b"reference", TypeError, f"{NAMES}b'reference'"),
    ],
    ids=["misspelt", "empty", "one-of-two", "none", "one-no-name", "number", "boolean", "bytes"],
)
def test_an_unknown_backend_is_refused(verb, backend, error, text):
    refuses(lambda: verb(SOFTMAX, Q, K, V, backend=backend), error, text)


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        ((), TypeError, f"{NAMES}()"),
        ((3,), TypeError, f"{NAMES}(3,)"),
        (("reference", "tritn"), ValueError, "unknown backend 'tritn'; known are "),
    ],
    ids=["none", "number", "misspelt"],
)
def test_use_backend_refuses_unknown_names_on_entry(names, error, text):
    refuses(lambda: pa.use_backend(*names).__enter__(), error, text)


@pytest.mark.parametrize("verb", ["backward", "extend", "", None])
def test_explain_refuses_a_verb_that_is_none(verb):
    text = f"softmax: verb must be 'forward' or 'vjp' (for extend, pass the cache); found {verb!r}"
    refuses(lambda: SOFTMAX.explain(Q, K, V, verb=verb), ValueError, text)


def test_explain_refuses_a_cache_with_what_belongs_to_a_full_call():
    text = "softmax: a cache is for extend, which has no segment_ids"
    packed = {"segment_ids": np.zeros((2, 4), int)}
    refuses(lambda: SOFTMAX.explain(Q, K, V, cache=cache_for(), **packed), ValueError, text)


def test_a_gradient_through_a_cache_of_tokens_is_refused():
    text = "softmax: extend_vjp needs a cache of states, and this cache stores tokens; use vjp of a"
    for verb in (SOFTMAX.extend_vjp, lambda *x: SOFTMAX.explain(*x[1:], cache=x[0], verb="vjp")):
        refuses(lambda verb=verb: verb(cache_for(), Q, K, V), TypeError, text)


class Given:
    """Everything that one call may be given, in one library, with NaN where nothing is read."""

    def __init__(self, library, mechanism):
        rng = np.random.default_rng(1)
        q, k, v, g = rng.normal(size=(4, 2, 4, 2, 3))
        for array in (q, k, v):
            array[0, 3:] = np.nan
        layout = Layout("given", t=4, s=4, h=2, n=2, d=3, e=3)
        extra = make_inputs(mechanism, layout, "random")
        convert = torch.asarray if library == "torch" else np.asarray
        self.mechanism = mechanism
        self.named = {"q": convert(q), "k": convert(k), "v": convert(v)}
        self.named = {n: convert(a) for n, a in extra.items()} | self.named
        self.cotangent = convert(g)
        self.lengths = convert(np.asarray([3, 4]))
        self.beyond = convert(np.asarray([3, 5]))
        self.key_mask = convert(rng.uniform(size=(2, 4)) < 0.7)
        self.short_mask = self.key_mask[:, :3]
        self.segment_ids = convert(np.asarray([[0, 0, 1, 1], [5, 5, 5, 2]]))
        self.torn_ids = convert(np.asarray([[0, 1, 0, 1], [0, 0, 0, 0]]))
        self.cache = self.full = None
        if mechanism.offers.causal:
            cache = mechanism.init_cache(**self.named, capacity=8, key_mask=True)
            wide = convert(rng.normal(size=(2, 2, 4, 8)))
            self.new = self.named | ({"bias": wide} if "bias" in self.named else {})
            first = {"lengths": self.lengths, "key_mask": self.key_mask}
            _, self.cache = mechanism.extend(cache, **self.new, **first)
            _, self.full = mechanism.extend(self.cache, **self.new)

    def snapshot(self):
        """Every array in it, copied."""
        found = {}

        def visit(path, value):
            if isinstance(value, dict):
                for name, item in value.items():
                    visit((*path, name), item)
            elif isinstance(value, pa.Cache):
                visit((*path, "length"), value.length)
                visit((*path, "store"), value.store)
            elif hasattr(value, "shape"):
                found[path] = np.asarray(value).copy()

        visit((), vars(self))
        return found


ACTS = {
    "call": lambda x: x.mechanism(**x.named),
    "call with lengths": lambda x: x.mechanism(**x.named, lengths=x.lengths),
    "call with every mask": lambda x: x.mechanism(
        **x.named, lengths=x.lengths, key_mask=x.key_mask, segment_ids=x.segment_ids
    ),
    "pullback": lambda x: x.mechanism.vjp(**x.named, lengths=x.lengths, key_mask=x.key_mask)[1](
        x.cotangent
    ),
    "explain": lambda x: x.mechanism.explain(**x.named, lengths=x.lengths),
}
CACHE_ACTS = {
    "init_cache": lambda x: x.mechanism.init_cache(**x.named, capacity=8),
    "extend": lambda x: x.mechanism.extend(x.cache, **x.new),
    "extend with masks": lambda x: x.mechanism.extend(
        x.cache, **x.new, lengths=x.lengths, key_mask=x.key_mask
    ),
    "explain extend": lambda x: x.mechanism.explain(**x.new, cache=x.cache),
}
BAD_ACTS = {
    "unknown keyword": lambda x: x.mechanism(**x.named, length=x.lengths),
    "unknown backend": lambda x: x.mechanism(**x.named, backend="tritn", lengths=x.lengths),
    "lengths beyond": lambda x: x.mechanism(**x.named, lengths=x.beyond, key_mask=x.key_mask),
    "short mask": lambda x: x.mechanism(**x.named, lengths=x.lengths, key_mask=x.short_mask),
    "torn segments": lambda x: x.mechanism(**x.named, lengths=x.lengths, segment_ids=x.torn_ids),
    "conflicting width": lambda x: x.mechanism(**(x.named | {"k": x.named["k"][..., :2]})),
    "cotangent of another shape": lambda x: x.mechanism.vjp(**x.named, lengths=x.lengths)[1](
        x.cotangent[:1]
    ),
}
BAD_CACHE_ACTS = {
    f"{name}{', donated' if donate else ''}": partial(act, donate=donate)
    for donate in (False, True)
    for name, act in {
        "capacity exceeded": lambda x, donate: x.mechanism.extend(x.full, **x.new, donate=donate),
        "new lengths beyond": lambda x, donate: x.mechanism.extend(
            x.cache, **x.new, lengths=x.beyond, donate=donate
        ),
        "short new mask": lambda x, donate: x.mechanism.extend(
            x.cache, **x.new, key_mask=x.short_mask, donate=donate
        ),
        "unknown backend for extend": lambda x, donate: x.mechanism.extend(
            x.cache, **x.new, backend="tritn", donate=donate
        ),
    }.items()
}


WORDS = {
    "unknown keyword": "unknown keyword 'length'",
    "unknown backend": "unknown backend 'tritn'",
    "lengths beyond": "lengths must lie between 0 and s = 4",
    "short mask": "key_mask is declared",
    "torn segments": "segment_ids must be contiguous",
    "conflicting width": "k is declared",
    "cotangent of another shape": "the cotangent must have the output's shape",
    "capacity exceeded": "capacity exceeded",
    "new lengths beyond": "lengths must lie between 0 and t = 4",
    "short new mask": "key_mask is declared",
    "unknown backend for extend": "unknown backend 'tritn'",
}
FREE_TEXT = "softmax[causal=false]"
CAUSAL_TEXTS = [
    "softmax",
    "softmax[bias=true]",
    "lucid",
    "lucid[beta=true]",
    "lucid[normalize=queries_and_keys]",
    "lucid[normalize=rows]",
    "laser",
    "lucid(laser)",
    "lucid(path[flush=3])",
    "path[forget=scaled]",
    "differential[per=token]",
    "row_normalized(qk_norm[gain=true])",
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("text", "act"),
    [
        *((text, act) for text in [*CAUSAL_TEXTS, FREE_TEXT] for act in [*ACTS, *BAD_ACTS]),
        *((text, act) for text in CAUSAL_TEXTS for act in [*CACHE_ACTS, *BAD_CACHE_ACTS]),
    ],
)
def test_no_input_mask_or_cache_is_modified_even_when_an_error_is_raised(text, act, library):
    given = Given(library, pa.parse(text))
    before = given.snapshot()
    run = {**ACTS, **CACHE_ACTS, **BAD_ACTS, **BAD_CACHE_ACTS}[act]
    words = WORDS.get(act.removesuffix(", donated"))
    if words is None:
        run(given)
    else:
        refuses(lambda: run(given), (TypeError, ValueError), words)
    after = given.snapshot()
    assert after.keys() == before.keys()
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array, err_msg=str(path), strict=True)


TRACED = ["softmax", "softmax[window=2]", "lucid", "lucid[normalize=rows]", "laser", "lucid(laser)"]
TRACED += ["path[flush=3]", "lucid(path)"]


def assert_only_sequence_one_is_nan(out, expected):
    assert np.isnan(out[1]).all(), "sequence 1 has plausible values"
    for i in (0, 2):
        np.testing.assert_allclose(out[i], expected[i], rtol=1e-12, atol=1e-12)


def traced_inputs(mechanism):
    layout = Layout("traced", b=3, t=4, s=4, h=2, n=2, d=3, e=3)
    return {n: jnp.asarray(a) for n, a in make_inputs(mechanism, layout, "random").items()}


def traced_outputs(mechanism, kind):
    """What a jitted call gives for values that are bad in sequence 1 only, and for good ones."""
    x = traced_inputs(mechanism)
    if kind.startswith("lengths"):
        run = jax.jit(lambda lengths: mechanism(**x, lengths=lengths))
        bad = {"lengths above": 5, "lengths below": -1, "lengths huge": 2**32 + 2}[kind]
        return tuple(run(jnp.asarray([2, n, 4])) for n in (bad, 3))
    if kind == "torn segments":
        run = jax.jit(lambda ids: mechanism(**x, segment_ids=ids))
        ids = jnp.asarray([[0, 0, 1, 1], [0, 1, 0, 0], [3, 3, 3, 3]])
        return run(ids), run(ids.at[1].set(0))
    if kind == "capacity":
        run = jax.jit(lambda cache: mechanism.extend(cache, **x)[0])
        cache = mechanism.init_cache(**x, capacity=6)
        _, bad = mechanism.extend(cache, **x, lengths=[1, 3, 2])
        _, good = mechanism.extend(cache, **x, lengths=[1, 2, 2])
        return run(bad), run(good)
    run = jax.jit(lambda cache, n: mechanism.extend(cache, **x, lengths=n)[0])
    cache = mechanism.init_cache(**x, capacity=8)
    return tuple(run(cache, jnp.asarray([2, n, 4])) for n in (5, 3))


@pytest.mark.parametrize(
    "kind",
    [
        "lengths above",
        "lengths below",
        "lengths huge",
        "torn segments",
        "capacity",
        "new lengths above",
    ],
)
@pytest.mark.parametrize("text", TRACED)
def test_traced_bad_values_give_nan_for_their_sequence_and_right_values_for_the_others(text, kind):
    out, expected = traced_outputs(pa.parse(text), kind)
    assert not np.isnan(expected).any()
    assert_only_sequence_one_is_nan(out, expected)


@pytest.mark.parametrize("count", [5, -1])
@pytest.mark.parametrize("text", TRACED)
def test_a_sequence_spoiled_by_traced_lengths_stays_nan_when_its_cache_is_extended(text, count):
    mechanism = pa.parse(text)
    x = traced_inputs(mechanism)
    run = jax.jit(lambda cache, n: mechanism.extend(cache, **x, lengths=n))
    cache = mechanism.init_cache(**x, capacity=32)
    _, spoiled = run(cache, jnp.asarray([2, count, 4]))
    _, sound = run(cache, jnp.asarray([2, 3, 4]))
    whole = jnp.asarray([4, 4, 4])
    assert_only_sequence_one_is_nan(run(spoiled, whole)[0], run(sound, whole)[0])


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [
        (np.asarray([-3, 0], np.int32), ValueError, "the cache's length is negative"),
        (np.zeros(2), TypeError, "must be integers of shape .* found float64"),
        (np.zeros((2, 1), np.int32), TypeError, "must be integers of shape .* found int32 of"),
    ],
)
def test_a_cache_whose_length_is_no_length_is_refused(length, error, text):
    m, q = pa.Softmax(), np.ones((2, 1, 2, 4))
    cache = m.init_cache(q, q, q, capacity=4)._replace(length=length)
    with pytest.raises(error, match=text):
        m.extend(cache, q, q, q)


def test_donate_must_be_true_or_false():
    m, q = pa.Softmax(), np.ones((2, 1, 2, 4))
    with pytest.raises(TypeError, match="donate must be true or false; found 'no'"):
        m.extend(m.init_cache(q, q, q, capacity=4), q, q, q, donate="no")


def test_lengths_may_be_a_list_of_numpys_whole_numbers():
    q = np.ones((2, 3, 2, 4))
    np.testing.assert_array_equal(
        pa.softmax(q, q, q, lengths=[np.int64(3), 1]), pa.softmax(q, q, q, lengths=[3, 1])
    )


def test_gradients_of_a_sequence_with_bad_traced_lengths_are_nan():
    import jax

    q = np.random.default_rng(0).normal(size=(2, 3, 2, 4))
    lengths = jax.numpy.asarray([9, 3])
    found = jax.jit(jax.grad(lambda v, n: pa.softmax(q_, q_, v, lengths=n).sum()))
    q_ = jax.numpy.asarray(q)
    gradient = np.asarray(found(q_, lengths))
    assert np.isnan(gradient[0]).all()
    assert np.isfinite(gradient[1]).all()
