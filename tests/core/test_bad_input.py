"""Inputs, lengths, masks and backends that contradict a call are refused by every verb.

The error names the argument, what was expected and what was found.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.bad_input import (
    ARRAY,
    BIASED,
    EXTENDING,
    FREE,
    FULL,
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

REAL = "must be of dtype float16, bfloat16, float32 or float64; found"
SHAPE, NO_KEYWORD = pa.ShapeError, "softmax: unknown keyword"
TOO_MANY = "softmax takes q, k, v: at most 3 by position, the others by name; found 4 by position"
WIDE = Q.astype(np.float16), f32(K), V.astype(np.float16)
NAMES = "backend must be a name or a tuple of names; found "
OF_BATCH = "lengths is declared (b), that is (2,); found"
AS_INPUTS = "must be an array of numpy, as the inputs; found"
BETA = pa.Lucid(beta=True)


def of_torch(array):
    return pytest.importorskip("torch").tensor(array)


def on_meta(array):
    return of_torch(array).to("meta")


HEADS = "softmax: query heads (h = 3) must be a multiple of key/value heads (n = 2); found shapes "
INPUTS = [
    (SOFTMAX, {"length": [1, 2]}, TypeError, f"{NO_KEYWORD} 'length' (did you mean 'lengths'?)"),
    (SOFTMAX, {"dropout_p": 0.0}, TypeError, f"{NO_KEYWORD} 'dropout_p' (no mechanism drops weig"),
    (LUCID, {"lucid_beta": Q[..., 0]}, TypeError, "lucid: unknown keyword 'lucid_beta'; lucid tak"),
    (SOFTMAX, {"k": ..., "v": ...}, TypeError, "softmax: missing k, v; softmax takes q, k, v"),
    (BETA, {}, TypeError, "lucid[beta=true]: missing lucid_beta; lucid[beta=true] takes q"),
    (SOFTMAX, {"q": Q.tolist()}, TypeError, f"softmax: q {ARRAY} list"),
    (SOFTMAX, dict(zip("qkv", WIDE, strict=True)), TypeError, f"{ONE_DTYPE}{{'q': 'float16', 'k'"),
    (SOFTMAX, {"q": Q.astype(int)}, TypeError, f"softmax: q {REAL} int64"),
    (SOFTMAX, {"k": K * 1j}, TypeError, f"softmax: k {REAL} complex128"),
    (SOFTMAX, {"q": Q[0]}, SHAPE, "found shape (4, 2, 3): 4 axes expected, not 3"),
    (SOFTMAX, {"q": np.float64(1)}, SHAPE, "found shape (): 4 axes expected, not 0"),
    (SOFTMAX, {"q": Q[..., :0], "k": K[..., :0]}, SHAPE, "(2, 4, 2, 0): axis 3 (d) is empty"),
    (SOFTMAX, {"q": np.zeros((2, 4, 3, 3))}, SHAPE, f"{HEADS}{{'q': (2, 4, 3, 3), "),
    (BETA, {"lucid_beta": np.ones((2, 4, 1))}, SHAPE, "shape (2, 4, 1): axis 2 (n) is 1"),
    # Backends
    (SOFTMAX, {"backend": "tritn"}, ValueError, "unknown backend 'tritn'; known are "),
    (SOFTMAX, {"backend": ()}, TypeError, f"{NAMES}()"),
    (SOFTMAX, {"backend": ("reference", 3)}, TypeError, f"{NAMES}('reference', 3)"),
    (SOFTMAX, {"backend": b"reference"}, TypeError, f"{NAMES}b'reference'"),
    # Masks
    (SOFTMAX, {"key_mask": np.ones((2, 4))}, TypeError, "bool; found float64"),
    (SOFTMAX, {"key_mask": np.ones((1, 4), bool)}, SHAPE, "that is (2, 4); found (1, 4)"),
    (SOFTMAX, {"key_mask": [[True] * 4] * 2}, TypeError, f"key_mask {AS_INPUTS} list"),
]


def run(verb, mechanism, changes):
    """Inputs by name; `...` leaves one out."""
    given = {"q": Q, "k": K, "v": V} | changes
    return verb(mechanism, **{name: x for name, x in given.items() if x is not ...})


def ids(rows):
    return [f"{m}-{','.join(changes)}-{i}" for i, (m, changes, *_) in enumerate(rows)]


@pytest.mark.parametrize(("mechanism", "changes", "error", "text"), INPUTS, ids=ids(INPUTS))
def test_an_input_that_does_not_fit_its_declaration_is_refused_by_every_verb(
    mechanism, changes, error, text
):
    for verb in (*FULL, *EXTENDING):
        refuses(lambda verb=verb: run(verb, mechanism, changes), error, text)


@pytest.mark.parametrize(
    ("mechanism", "arrays", "named", "text"),
    [
        (SOFTMAX, (Q, K, V), {"v": V}, "softmax: v is given by position and by name"),
        (SOFTMAX, (Q, K, V, Q), {}, TOO_MANY),
        (BIASED, (Q, K, V, Q), {}, "by name, as in (q, k, v, bias=bias); found 4 by position"),
    ],
    ids=["twice", "too many", "bias"],
)
def test_inputs_by_position_are_counted_by_every_verb(mechanism, arrays, named, text):
    for verb in (*FULL, *EXTENDING):
        refuses(lambda verb=verb: verb(mechanism, *arrays, **named), TypeError, text)


LAYOUT = CallLayout("test", t=4, s=4, h=4, n=2, d=3, e=2)


def of(text, **changes):
    """A mechanism, and its inputs with changes: the shape of an array of ones, or a value."""
    x = make_inputs(pa.parse(text), LAYOUT, "random")
    changed = {n: np.ones(a) if isinstance(a, tuple) else a for n, a in changes.items()}
    return pa.parse(text), x | changed


SEGMENTS = "softmax: segment_ids is declared (b s), that is (2, 4); found"
FEW_KEYS = {"k": K[:, :2], "v": V[:, :2]}
TORN = np.asarray([[0, 0, 1, 1], [0, 1, 0, 1]])
CALLS = [
    (SOFTMAX, {"k": K[..., :2]}, SHAPE, "k is declared (b s n d), found shape (2, 4, 2, 2)"),
    (SOFTMAX, {"k": K[:1]}, SHAPE, "found shape (1, 4, 2, 3): axis 0 (b) is 1, but 2 in q"),
    (SOFTMAX, {"v": V[:, :, :1]}, SHAPE, "found shape (2, 4, 1, 3): axis 2 (n) is 1, but 2 in k"),
    (BIASED, {"bias": np.zeros((3, 1, 4, 4))}, SHAPE, "axis 0 (1|b) is 3, but 2 in q"),
    (SOFTMAX, FEW_KEYS, SHAPE, "is causal, so there must not be more queries than keys; found t"),
    (FREE, FEW_KEYS | {"segment_ids": TORN[:, :2]}, ValueError, "needs as many queries as keys"),
    (SOFTMAX, {"segment_ids": TORN}, ValueError, "contiguous: each id in one run (sequence 1"),
    (SOFTMAX, {"segment_ids": TORN[:, :3]}, SHAPE, f"{SEGMENTS} (2, 3)"),
    (SOFTMAX, {"segment_ids": TORN * 1.0}, TypeError, "must have an integer dtype; found float64"),
    (SOFTMAX, {"segment_ids": [[0] * 4] * 2}, TypeError, f"softmax: segment_ids {AS_INPUTS} list"),
    # Inputs of compositions
    (*of("path", w=(2, 4, 4, 3)), SHAPE, "path: w is declared (b s n d), found shape (2, 4, 4, 3)"),
    (*of("path", w=(2, 4, 2, 2)), SHAPE, "axis 3 (d) is 2, but 3 in q"),
    (*of("path", beta=...), TypeError, "missing beta; "),
    (*of("differential", lam=(4,)), SHAPE, "lam is declared (), found shape (4,): 0 axes expected"),
    (*of("differential", lam=0.5), TypeError, "lam must be an array of NumPy"),
    (*of("differential[per=token]", lam=(2, 4, 1)), SHAPE, "axis 2 (h) is 1, but 4 in q"),
    (*of("per_dim_scale", per_dim=(4,)), SHAPE, "per_dim is declared (d), found shape (4,)"),
]


@pytest.mark.parametrize(("mechanism", "changes", "error", "text"), CALLS, ids=ids(CALLS))
def test_a_full_call_refuses_inputs_and_segments_that_contradict_each_other(
    mechanism, changes, error, text
):
    for verb in FULL:
        refuses(lambda verb=verb: run(verb, mechanism, changes), error, text)


@pytest.mark.parametrize(
    ("lengths", "error", "text"),
    [
        ([4, 5], ValueError, "lie between 0 and {} = 4 (sequence 1"),
        ([-1, 4], ValueError, "lie between 0 and {} = 4 (sequence 0"),
        (np.asarray([2**32 + 1, 2]), ValueError, "lie between 0 and {} = 4 (sequence 0 of the"),
        (np.uint64([2**64 - 2**32 + 1, 2]), ValueError, "lie between 0 and {} = 4"),
        ([2**40, 1], ValueError, "softmax: lengths must"),
        ([1.5, 2], TypeError, "lengths must be whole numbers; found [1.5, 2]"),
        ([True, 1], TypeError, "lengths must be whole numbers; found [True, 1]"),
        (np.asarray([1.0, 2.0]), TypeError, "lengths must have an integer dtype; found float64"),
        ((1, 2, 3), SHAPE, f"{OF_BATCH} (3,)"),
        (np.asarray([[1, 2]]), SHAPE, f"{OF_BATCH} (1, 2)"),
        (3, TypeError, f"lengths {AS_INPUTS} int"),
    ],
    ids=str,
)
def test_lengths_out_of_range_or_of_the_wrong_type_are_refused(lengths, error, text):
    for verbs, letter in ((FULL, "s"), (EXTENDING, "t")):
        for verb in verbs:
            message = text.format(letter)
            refuses(lambda verb=verb: verb(SOFTMAX, Q, K, V, lengths=lengths), error, message)


def test_arrays_of_another_library_or_device_are_refused():
    of_cpu = dict(zip("qkv", map(of_torch, (Q, K, V)), strict=True))
    libraries = "inputs of one library expected; found {'q': 'numpy', 'k': 'torch', 'v': 'numpy'}"
    devices = "inputs on one device expected; found {'q': 'cpu', 'k': 'meta', 'v': 'cpu'}"
    for changes, error, text in (
        ({"k": of_torch(K)}, TypeError, libraries),
        (of_cpu | {"k": on_meta(K)}, ValueError, devices),
        ({"lengths": of_torch([1, 2])}, TypeError, f"lengths {AS_INPUTS} one of torch"),
        ({"key_mask": of_torch([[True] * 4] * 2)}, TypeError, f"key_mask {AS_INPUTS} one of torch"),
        (
            *(of_cpu | {"key_mask": on_meta(K[..., 0, 0] > 0)}, ValueError),
            "key_mask is on meta; the inputs are on cpu",
        ),
    ):
        for verb in FULL:
            refuses(lambda verb=verb, c=changes: run(verb, SOFTMAX, c), error, text)


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


def test_explain_refuses_what_it_can_not_plan():
    text = "softmax: verb must be 'forward' or 'vjp' (for extend, pass the cache); found {!r}"
    for verb in ("extend", None):
        refuses(lambda v=verb: SOFTMAX.explain(Q, K, V, verb=v), ValueError, text.format(verb))
    text = "softmax: segment_ids divides an extension into several; explain one of them, without"
    packed = {"segment_ids": np.zeros((2, 4), int)}
    refuses(lambda: SOFTMAX.explain(Q, K, V, cache=cache_for(), **packed), ValueError, text)


def test_second_keys_are_of_the_calls_dtype_and_gates_may_be_wider():
    """Otherwise a cache would silently store float32 keys in half precision."""
    m = pa.Differential(pa.Path(forget="scaled"), per="head")
    x = {n: a.astype(np.float16) for n, a in make_inputs(m, LAYOUT, "random").items()}
    with pytest.raises(TypeError, match=r"inputs of one dtype expected.*'k2': 'float32'"):
        m(**x | {"k2": x["k2"].astype(np.float32)})
    wide = {n: x[n].astype(np.float32) for n in ("w", "beta", "g", "lam")}
    assert m(**x | wide).dtype == np.float16
