"""Inputs, lengths and masks that contradict their declarations are refused before any work.

The error names the argument, what was expected and what was found.
"""

import re
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
    by_call,
    by_explain,
    by_explain_extend,
    by_extend,
    by_vjp,
    every_verb,
    f32,
    refuses,
)
from tests.core.bad_tensors import TK, TQ, TV

REAL = "must be of dtype float16, bfloat16, float32 or float64; found"


every_full_call = pytest.mark.parametrize("verb", [by_call, by_vjp, by_explain])


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
            "keyword without a similar name",
            "softmax: unknown keyword 'xyz'; softmax takes q, k, v",
            (Q, K, V),
            TypeError,
            xyz=1,
        ),
        inputs_case(
            "dropout",
            "softmax: unknown keyword 'dropout_p' (no mechanism drops weights",
            (Q, K, V),
            TypeError,
            dropout_p=0.0,
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
            "the others by name, as in (q, k, v, bias=bias); found 4 by position",
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
def test_lengths_out_of_range_or_of_the_wrong_type_are_refused(verb, lengths, error, text):
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
def test_a_key_mask_of_the_wrong_type_or_shape_is_refused(verb, mask, error, text):
    with pytest.raises(error, match="softmax: key_mask .*" + re.escape(text)):
        verb(SOFTMAX, Q, K, V, key_mask=mask)


def test_a_mask_on_another_device_is_refused():
    mask = torch.ones((2, 4), dtype=torch.bool, device="meta")
    text = "softmax: key_mask is on meta; the inputs are on cpu"
    refuses(lambda: SOFTMAX(TQ, TK, TV, key_mask=mask), ValueError, text)


def test_lengths_may_be_a_list_of_numpy_integers():
    q = np.ones((2, 3, 2, 4))
    np.testing.assert_array_equal(
        pa.softmax(q, q, q, lengths=[np.int64(3), 1]), pa.softmax(q, q, q, lengths=[3, 1])
    )
