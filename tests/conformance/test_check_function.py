"""`check` of plain functions: right ones, wrong ones, and ones with partial support."""

import inspect

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_conformance import backend_from_function, check
from precondattn_conformance.extremes import FORWARD_ONLY
from precondattn_conformance.functions.arrangement import Arrangement
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import UNSUPPORTED

torch = pytest.importorskip("torch")

from tests.conformance.plain_functions import (  # noqa: E402
    attend,
    checked,
    chunk_kda,
    gated_by_differences,
    heads_first,
    lucid,
    normalised,
    plain,
)

FIRST = {"layout": "bhtd", "heads": "equal"}

# Right functions, as they are written.


def of_one_sequence(q, k, v):
    return attend(q[None], k[None], v[None])[0]


def by_position(q, k, v, /, *, causal=True):
    assert causal
    return attend(q, k, v)


def with_other_names(x, y, z):
    return attend(x, y, z)


def of_numbers(q, k, v, scale, softcap, window=-1, dropout=0.0):
    assert (softcap, window) == (None, -1)
    return attend(q * scale * q.shape[-1] ** 0.5, k, v)


def of_normalised(q, k, v):
    return attend(normalised(q), normalised(k), v)


def reference(q, k, v):
    """It has the name of a backend."""
    return attend(q, k, v)


def in_numpy(q, k, v):
    return np.asarray(pa.softmax(q, k, v, backend="reference"))


def of_few(q, k, v):
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("grouped heads are not written yet")
    return attend(q, k, v)


BOTH = ("outputs", "gradients")
RIGHT = [
    (heads_first, "softmax", ("outputs",), FIRST, "has no parameter for segment_ids"),
    (of_one_sequence, "softmax", ("gradients",), {"layout": "thd"}, ""),
    (by_position, "softmax", ("outputs",), {}, ""),
    (with_other_names, "softmax", ("outputs",), {}, "called by position: q, k, v"),
    (of_numbers, "softmax", ("outputs",), {}, "parameters that keep their defaults: dropout"),
    (of_normalised, "qk_norm", BOTH, {"dtypes": ["float64", "float32"]}, ""),
    (reference, "softmax", ("dtypes",), {}, "reference_function computes softmax"),
    (in_numpy, "softmax", ("outputs",), {"library": "numpy"}, "has no gradient"),
    (of_few, "softmax", ("outputs",), {}, "NotImplementedError: grouped heads are not written yet"),
    (chunk_kda, "kda", (*BOTH, "caching"), {"heads": "equal"}, ""),
    (lucid, "lucid", ("outputs", "caching"), {}, "has no parameter for key_mask"),
]


@pytest.mark.parametrize("row", RIGHT, ids=lambda row: row[0].__name__)
def test_a_right_function_passes_in_all_that_it_can_do(row):
    function, mechanism, checks, options, says = row
    asked = (*checks, "gradients") if function is in_numpy else checks
    result = checked(function, mechanism, *asked, **options)
    assert result
    assert result.passed, str(result)
    assert not result.findings
    compared = {outcome.case.check for outcome in result.compared}
    assert compared == set(checks) - ({"caching"} if function is lucid else set())
    assert {o.case.library for o in result.compared} == {options.get("library", "torch")}
    text = f"{result}\n{list(result.declined)}"
    assert says in text
    assert bool(result.partial) == (function is of_few), result.partial
    if function is of_few:
        assert "is right where it could be compared with softmax" in result.verdict
        assert f": {len(result.compared)} of {len(result.outcomes)} cases" in result.verdict
    if function is lucid:
        assert "has no parameter for a state" in result.declined
        assert any("lengths (" in line and "window (" in line for line in text.splitlines())


def hidden_before_exp(weights, apart, later):
    return weights * apart.masked_fill(later, -torch.inf).exp()


def test_a_wrong_function_fails_and_is_diagnosed():
    def early(q, k, v, g, beta):
        late = torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)
        return chunk_kda(q, k, v, late, beta)[0]

    result = checked(early, "kda", "outputs", heads="equal")
    assert not result.passed
    assert any("one token late" in str(finding) for finding in result.findings)
    assert "does not compute kda" in str(result)
    assert "<table>" in result._repr_html_()


def test_a_decay_that_is_a_difference_of_cumulative_sums_fails_at_gates_of_many_digits():
    options = {"library": "torch", "dtypes": ["float32"], "level": "full"}
    result = checked(gated_by_differences(hidden_before_exp), "ssd", "stability", **options)
    failed = {(o.case.layout.name, o.case.kind) for o in result.failures}
    assert ("block_and_one", "extreme_gates") in failed


@pytest.mark.parametrize("hides", [False, True])
def test_a_nan_has_to_reach_the_sequences_that_depend_on_it(hides):
    expression = "nystrom[landmarks=3,start=batch]"

    def from_the_batch(q, k, v):
        q, k, v = (x.nan_to_num() if hides else x for x in (q, k, v))
        return pa.parse(expression)(q, k, v, backend="reference")

    result = checked(from_the_batch, expression, "future", gradient=False, library="torch")
    reasons = [outcome.reason for outcome in result.failures]
    assert result.compared
    assert all("finite: something replaces NaN" in reason for reason in reasons)
    assert bool(reasons) == hides


# Functions without a gradient: their outputs are compared, also by checks of gradients.

OF_OUTPUTS = (
    *("stability", "padding", "packing", "future", "dtypes"),
    *("determinism", "order_of_calls", "strides", "threads"),
)


def without_gradient(function, *checks, **options):
    return checked(function, "softmax", *checks, library="torch", gradient=False, **options)


def masked(q, k, v, key_mask=None, segment_ids=None):
    return attend(q, k, v, key_mask, segment_ids)


def test_a_right_forward_passes_every_check_that_outputs_alone_can_tell():
    result = without_gradient(masked, *OF_OUTPUTS)
    assert result.passed, str(result)
    assert all(right for right, _, _ in result.by_check.values()), result.by_check
    assert "has no gradient" in result.outputs_only
    (count,) = result.outputs_only.values()
    assert count == sum(o.case.kind not in FORWARD_ONLY for o in result.compared)
    assert f"in outputs only ({count}): has no gradient" in str(result)
    assert "in outputs only" in result._repr_html_()
    entry = Result.of_outcome(result.compared[-1]).to_json()
    assert "has no gradient" in entry["outputs_only"]
    assert Result.from_json(entry).outputs_only == entry["outputs_only"]
    with_gradient = checked(masked, "softmax", "strides")
    assert with_gradient.passed, str(with_gradient)
    assert not with_gradient.outputs_only
    assert "outputs_only" not in Result.of_outcome(with_gradient.compared[0]).to_json()
    half = without_gradient(masked, "packing", dtypes=["float16"])
    assert {outcome.status for outcome in half.outcomes} <= {UNSUPPORTED}


def as_if_contiguous(x):
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("packing", lambda q, k, v, segment_ids=None: attend(q, k, v)),
        ("padding", lambda q, k, v, key_mask=None: attend(q, k, v, key_mask.roll(1, 1))),
        ("stability", lambda q, k, v: attend(q.clamp(-30, 30), k, v)),
        ("strides", lambda q, k, v: attend(q, as_if_contiguous(k), v)),
    ],
)
def test_a_wrong_forward_fails_in_the_check_of_its_fault(name, wrong):
    result = without_gradient(wrong, name)
    assert result.failures
    assert "off by" in result.failures[0].reason


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, cotangent):
        return 2 * cotangent


def test_a_gradient_that_is_claimed_and_wrong_still_fails():
    def wrong(q, k, v, segment_ids=None):
        return attend(WrongGradient.apply(q), k, v, segment_ids=segment_ids)

    result = checked(wrong, "softmax", "packing")
    assert result.failures
    assert "vjp of q" in result.failures[0].reason
    assert not result.outputs_only


@pytest.mark.thorough(but=("mean",))
@pytest.mark.parametrize("row_of_no_key", ["zero", "mean"])
def test_a_function_of_jax_fails_if_rows_without_keys_are_a_mean(row_of_no_key):
    """JAX's own attention does this with a mask; its plain and packed calls are right."""
    jnp = pytest.importorskip("jax.numpy")

    def in_jax(query, key, value, is_causal=True, key_mask=None):
        t, s = query.shape[1], key.shape[1]
        visible = jnp.tril(jnp.ones((t, s), bool), s - t if is_causal else s)[None, None]
        if key_mask is not None:
            visible = visible & key_mask[:, None, None, :]
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        scores = jnp.where(visible, scores, -1e30)
        scores = jnp.exp(scores - scores.max(-1, keepdims=True))
        if row_of_no_key == "zero":
            scores = scores * visible.any(-1, keepdims=True)
        total = jnp.maximum(scores.sum(-1, keepdims=True), 1e-30)
        return jnp.einsum("bhts,bshd->bthd", scores / total, value)

    backend = backend_from_function(in_jax, "softmax", heads="equal")
    assert backend.libraries == {"jax"}
    assert backend.parameters.inputs == {"q": "query", "k": "key", "v": "value"}
    assert backend.parameters.options == {"causal": "is_causal"}
    chosen = {"heads": "equal", "library": "jax", "dtypes": ["float32"]}
    result = checked(in_jax, "softmax", "outputs", **chosen)
    wrong = {outcome.case.layout.name for outcome in result.failures}
    assert wrong == ({"masked"} if row_of_no_key == "mean" else set())
    assert len(result.compared) > len(result.failures)


def test_a_default_is_left_to_a_jitted_function_which_would_trace_it():
    jax = pytest.importorskip("jax")

    @jax.jit
    def jitted(q, k, v, causal=True):
        return v if causal else k

    backend = backend_from_function(jitted, "softmax", heads="equal")
    shapes = tuple((name, (1, 3, 2, 8)) for name in "qkv")
    request = pa.Request("forward", "jax", "cpu", "float32", shapes, frozenset())
    assert not backend.refusal(pa.Softmax(), request)
    assert "TracerBool" in backend.refusal(pa.Softmax(causal=False), request)


def broken(q, k, v):
    raise RuntimeError("no GPU")


def of_cuda(q, k, v):
    if not q.is_cuda:
        raise AssertionError


def called(q, k, v, beta):
    raise ValueError("called")


def of(shape):
    """A function with this change of its result."""
    return lambda q, k, v: shape(v)


RETURNED = r"returned the shape \(.*\); expected "
ERRORS = [
    ("kda", {}, TypeError, "function must be callable; found str"),
    (lambda qkv: qkv, {}, TypeError, "softmax has the inputs q, k, v; the parameters .* qkv:"),
    (lambda q, k, v, depth: v, {}, TypeError, "the function needs an argument 'depth'"),
    (called, {"mechanism": "gated_delta"}, TypeError, "no parameter for g, only q, k, v, beta"),
    (called, {"mechanism": "deltaformer"}, TypeError, "torch: raised ValueError: called"),
    (broken, {}, TypeError, r"(?s)of no array library;.*\n  torch: .*Error: no GPU\n  "),
    (of_cuda, {}, TypeError, r"AssertionError at \w+\.py:\d+: raise AssertionError"),
    (of(lambda v: {"out": v}), {}, TypeError, "returned dict with 'out'; expected an array"),
    (of(lambda v: v.flatten(2)), {}, TypeError, RETURNED + "the axes bthd"),
    (of(lambda v: torch.cat([v, v], 1)), {}, TypeError, r"\(1, 256, .*; expected \(1, 128, "),
    (plain, {"inputs": {"q": "x"}}, ValueError, r"parameters of the function \(q, k, v\)"),
    (plain, {"options": {"heads": "q"}}, ValueError, "options must map .*'heads'"),
    (plain, {"layout": "bhtt"}, ValueError, "layout must have the letters"),
    (plain, {"heads": "few"}, ValueError, "heads must be 'grouped' or 'equal'; found 'few'"),
    (plain, {"multiple": 0}, ValueError, "multiple must be at least 1; found 0"),
]


@pytest.mark.parametrize(("function", "options", "error", "message"), ERRORS)
def test_what_can_not_be_checked_is_refused_with_its_reason(function, options, error, message):
    with pytest.raises(error, match=message):
        check(function, **{"mechanism": "softmax", **options})


@pytest.mark.thorough(but=("plain",))
@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_a_modules_parameters_are_those_of_its_forward(how):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, causal=True, key_mask=None):
            return attend(q, k, v)

    module = Attention() if how == "plain" else torch.compile(Attention(), backend="eager")
    backend = backend_from_function(module, "softmax")
    assert backend.parameters.options == {"causal": "causal"}
    assert backend.parameters.masks == {"key_mask"}


def test_options_of_the_leaf_are_those_of_a_mechanism_that_is_one():
    def laser(q, k, v, scale=None):
        return attend(q, k, v.exp()).log()

    def keywords(q, k, v, beta, **state):
        return v

    assert backend_from_function(keywords, "delta", library="torch").parameters.state is None
    backend = backend_from_function(laser, "laser")
    assert backend.parameters.options == {"scale": "scale"}
    request = pa.Request("forward", "torch", "cpu", "float64", (), frozenset())
    windowed = pa.Softmax(read="log_mean_exp", window=3, scale=0.1)
    assert backend.lacks(windowed, request) == "has no parameter for the option window"


HEADS = {"heads": "equal"}
STEPS = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 4, 8), "v": (2, 5, 2, 4, 6), "g": (2, 5, 4)}
STEPS["beta"] = (2, 5, 2, 4)
VALUES = {
    "q": (1, 3, 1, 8),
    "k": (1, 3, 1, 8),
    "v": (1, 3, 2, 8),
    "g": (1, 3, 2),
    "beta": (1, 3, 2),
}
BIAS = {"q": (1, 5, 4, 8), "k": (1, 7, 4, 8), "v": (1, 7, 4, 8), "bias": (1, 4, 5, 7)}
GROUPED = {"q": (2, 5, 4, 8), "k": (2, 5, 1, 8), "v": (2, 5, 1, 8)}


def shapes_in_a_call(mechanism, shapes, **options):
    """The shapes that a function receives if it is called with arrays of these shapes."""
    found = {}

    def function(**inputs):
        found.update({name: tuple(x.shape) for name, x in inputs.items()})
        return inputs["q"]

    backend = backend_from_function(function, mechanism, library="numpy", **options)
    x = {name: np.zeros(shape) for name, shape in shapes.items()}
    backend.call(pa.parse(mechanism), x, full_frame(x["q"].shape[1], x["k"].shape[1], x["q"]))
    return found


@pytest.mark.parametrize(
    ("mechanism", "shapes", "options", "expected"),
    [
        ("softmax", GROUPED, HEADS, dict.fromkeys("qkv", (2, 5, 4, 8))),
        ("delta_product", STEPS, {}, {"k": (2, 5, 2, 4, 8)}),
        ("delta_product", STEPS, {"layout": "bhtd"}, {"beta": (2, 4, 5, 2)}),
        ("gated_delta", VALUES, HEADS, {"q": (1, 3, 2, 8)}),
        ("softmax[bias=true]", BIAS, {}, {"bias": BIAS["bias"]}),
        ("softmax[bias=true]", BIAS, {"layout": "bhtd"}, {"bias": BIAS["bias"]}),
    ],
)
def test_a_function_gets_arrays_of_its_arrangement(mechanism, shapes, options, expected):
    found = shapes_in_a_call(mechanism, shapes, **options)
    assert found == {**found, **expected}


def test_tokens_are_appended_for_a_function_of_multiples_and_cut_off():
    def in_blocks(q, k, v):
        assert q.shape[2] % 16 == 0
        return heads_first(q, k, v)

    backend = backend_from_function(in_blocks, "softmax", multiple=16, **FIRST)
    q, k, v = torch.randn(3, 2, 7, 2, 8, dtype=torch.float64)
    out = backend.call(pa.Softmax(), {"q": q, "k": k, "v": v}, {})[0]
    torch.testing.assert_close(out, pa.softmax(q, k, v, backend="reference"))
    out = np.zeros((2, 11, 2, 8))
    assert Arrangement(multiple=4).output(out[:, :8], 7).shape[1] == 7
    assert Arrangement(multiple=4).output(out, 7).shape[1] == 11
    with pytest.raises(ValueError, match="takes a multiple of 8 tokens, of all inputs alike"):
        shapes_in_a_call("softmax", {name: BIAS[name] for name in "qkv"}, multiple=8)


def test_narrow_values_and_their_state_are_widened_for_equal_widths():
    def equal_widths(q, k, v, *more, **states):
        assert q.shape[-1] == v.shape[-1], "widths differ"
        return chunk_kda(q, k, v, *more, **states)

    equal_widths.__signature__ = inspect.signature(chunk_kda)
    checks = ("stability", "splits")
    declined = checked(equal_widths, "kda", *checks, heads="equal")
    widened = checked(equal_widths, "kda", *checks, heads="equal", widths="equal")
    assert "raised AssertionError: widths differ" in declined.declined
    assert any('with widths="equal", zeros' in note for note in declined.notes)
    assert not any("widths" in note for note in widened.notes)
    assert widened.passed, str(widened)
    assert widened.by_check["stability"][0] > declined.by_check["stability"][0]
    assert widened.by_check["splits"][0] > 0
