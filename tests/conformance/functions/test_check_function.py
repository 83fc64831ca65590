"""`check` of plain functions: right ones, wrong ones, and ones with partial support."""

import inspect

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_conformance import backend_from_function, check
from precondattn_conformance.functions.arrangement import Arrangement
from precondattn_conformance.functions.diagnosis import diagnosis

torch = pytest.importorskip("torch")


def checked(function, mechanism, **options):
    return check(function, mechanism, progress=False, **options)


def attend(q, k, v):
    """Softmax attention with heads before tokens, equal head counts, and bottom-right alignment."""
    t, s = q.shape[2], k.shape[2]
    hidden = torch.ones(t, s, dtype=torch.bool).triu(s - t + 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """KDA as a recurrence, token by token, with the parameters of flash-linear-attention."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    d = q.shape[-1]
    state = q.new_zeros(*k.shape[:2], d, v.shape[-1]) if initial_state is None else initial_state
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        error = v[:, :, t] - torch.einsum("bhde,bhd->bhe", state, k[:, :, t])
        error = error * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * error[:, :, None, :]
        outs.append(torch.einsum("bhde,bhd->bhe", state, q[:, :, t]))
    out = torch.stack(outs, 1) * (d**-0.5 if scale is None else scale)
    return (out, state) if output_final_state else (out, None)


def test_a_right_function_passes_in_all_that_it_can_do():
    result = checked(attend, "softmax", layout="bhtd", heads="equal", checks=["outputs"])
    assert result.passed
    assert result
    assert not result.failures
    assert not result.findings
    assert {outcome.case.library for outcome in result.compared} == {"torch"}
    assert "has no parameter for segment_ids" in result.declined
    assert not result.partial


def test_a_recurrence_has_its_scale_and_its_state_by_the_names_of_parameters():
    result = checked(chunk_kda, "kda", heads="equal", checks=["outputs", "gradients", "caching"])
    assert result.passed, str(result)
    compared = {outcome.case.check for outcome in result.compared}
    assert compared == {"outputs", "gradients", "caching"}


def test_a_wrong_function_fails_and_is_diagnosed():
    def early(q, k, v, g, beta):
        late = torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)
        return chunk_kda(q, k, v, late, beta)[0]

    result = checked(early, "kda", heads="equal", checks=["outputs"])
    assert not result.passed
    assert any("one token late" in str(finding) for finding in result.findings)
    assert "does not compute kda" in str(result)
    assert "<table>" in result._repr_html_()


def test_an_error_of_the_function_is_a_reason_that_is_shown():
    def of_few(q, k, v):
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError("grouped heads are not written yet")
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    result = checked(of_few, "softmax", checks=["outputs"])
    assert "raised NotImplementedError: grouped heads are not written yet" in result.declined
    assert "grouped heads are not written yet" in str(result)
    assert result.passed
    assert "is right where it could be compared with softmax" in result.verdict
    assert f": {len(result.compared)} of {len(result.outcomes)} cases compared" in result.verdict
    assert [share.check for share in result.partial] == ["outputs"]


def test_a_function_without_gradient_is_compared_in_its_outputs():
    def in_numpy(q, k, v):
        return np.asarray(pa.softmax(q, k, v, backend="reference"))

    result = checked(in_numpy, "softmax", library="numpy", checks=["outputs", "gradients"])
    assert {outcome.case.check for outcome in result.compared} == {"outputs"}
    assert "has no gradient" in result.declined


def test_tokens_are_appended_for_a_function_of_multiples():
    def in_blocks(q, k, v):
        assert q.shape[2] % 16 == 0
        return attend(q, k, v)

    options = {"layout": "bhtd", "heads": "equal", "multiple": 16}
    backend = backend_from_function(in_blocks, "softmax", **options)
    q, k, v = torch.randn(3, 2, 7, 2, 8, dtype=torch.float64)
    out = backend.call(pa.Softmax(), {"q": q, "k": k, "v": v}, {})[0]
    torch.testing.assert_close(out, pa.softmax(q, k, v, backend="reference"))


def test_only_the_appended_tokens_are_cut_off():
    out = np.zeros((2, 11, 2, 8))
    assert Arrangement(multiple=4).output(out[:, :8], 7).shape[1] == 7
    assert Arrangement(multiple=4).output(out, 7).shape[1] == 11
    assert Arrangement().output(out, 7).shape[1] == 11


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_a_bias_keeps_its_axes_in_every_layout(layout):
    def read_equal(q, k, v, bias):
        if layout == "bthd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = (bias.softmax(-1) + 0 * (q @ k.mT)) @ v
        return out.transpose(1, 2) if layout == "bthd" else out

    backend = backend_from_function(read_equal, "softmax[bias=true]", layout=layout)
    softmax = pa.Softmax(bias=True, causal=False, scale=1e-30)
    q, k, v = torch.randn(3, 2, 5, 3, 5, dtype=torch.float64)
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    given = {"q": q, "k": k, "v": v, "bias": bias}
    out = backend.call(softmax, given, {})[0]
    torch.testing.assert_close(out, softmax(**given, backend="reference"))


@pytest.mark.parametrize("layout", ["thd", "htd"])
def test_a_function_of_one_sequence(layout):
    def of_one(q, k, v):
        swap = layout == "thd"
        q, k, v = ((x.transpose(0, 1) if swap else x)[None] for x in (q, k, v))
        out = attend(q, k, v)[0]
        return out.transpose(0, 1) if swap else out

    result = checked(of_one, "softmax", layout=layout, heads="equal", checks=["gradients"])
    assert result.passed, str(result)


def test_a_function_of_jax():
    jnp = pytest.importorskip("jax.numpy")

    def in_jax(query, key, value, is_causal=True):
        t, s = query.shape[1], key.shape[1]
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        if is_causal:
            scores = jnp.where(jnp.tril(jnp.ones((t, s)), s - t) > 0, scores, -jnp.inf)
        scores = jnp.exp(scores - scores.max(-1, keepdims=True))
        return jnp.einsum("bhts,bshd->bthd", scores / scores.sum(-1, keepdims=True), value)

    backend = backend_from_function(in_jax, "softmax", heads="equal")
    assert backend.libraries == {"jax"}
    assert backend.parameters.inputs == {"q": "query", "k": "key", "v": "value"}
    assert backend.parameters.options == {"causal": "is_causal"}
    assert checked(in_jax, "softmax", heads="equal", checks=["outputs"]).passed


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


def test_a_function_without_a_parameter_for_an_input_is_refused():
    with pytest.raises(TypeError, match="the function has no parameter for g, only q, k, v, beta"):
        check(lambda q, k, v, beta: v, "gated_delta")


def test_a_function_that_needs_more_is_refused():
    with pytest.raises(TypeError, match="the function needs an argument 'depth'"):
        check(lambda q, k, v, depth: v, "softmax")


def test_a_function_that_fails_in_every_library_is_refused_with_the_errors():
    def broken(q, k, v):
        raise RuntimeError("no GPU")

    with pytest.raises(TypeError, match=r"of no array library;.*\n  torch: .*Error: no GPU\n  "):
        check(broken, "softmax")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "bhtt"}, "layout must have the letters"),
        ({"heads": "few"}, "heads must be 'grouped' or 'equal'; found 'few'"),
        ({"widths": "wide"}, "widths must be .any. or .equal.; found .wide."),
        ({"multiple": 0}, "multiple must be at least 1; found 0"),
    ],
)
def test_bad_arrangements_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check(attend, "softmax", **options)


def of_grouped_heads(q, k, v, **options):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda q, k, v: {"out": attend(q, k, v)}, r"returned dict with 'out'; expected an array"),
        (lambda q, k, v: None, r"returned None; expected an array, or a tuple that begins with"),
        (lambda q, k, v: v.flatten(2), r"returned the shape \(.*\); expected the axes bthd"),
        (lambda q, k, v: v[..., :1], r"returned the shape \(.*\); expected \("),
        (
            lambda q, k, v: torch.cat([v, v], 1),
            r"returned the shape \(1, 256, .*; expected \(1, 128, ",
        ),
    ],
)
def test_what_a_function_should_have_returned_is_said(function, found):
    with pytest.raises(TypeError, match=found):
        check(function, "softmax")


def test_an_assertion_without_a_message_is_shown_with_its_line():
    def of_cuda(q, k, v):
        if not q.is_cuda:
            raise AssertionError

    with pytest.raises(TypeError, match=r"AssertionError at \w+\.py:\d+: raise AssertionError"):
        check(of_cuda, "softmax")


@pytest.mark.parametrize(
    ("function", "names", "error", "message"),
    [
        ("kda", {}, TypeError, "function must be callable; found str"),
        (lambda qkv: qkv, {}, TypeError, "softmax has the inputs q, k, v; the parameters .* qkv:"),
        (attend, {"inputs": {"query": "q"}}, ValueError, "inputs must map names of softmax"),
        (attend, {"inputs": {"q": "x"}}, ValueError, r"parameters of the function \(q, k, v\)"),
        (attend, {"options": {"heads": "q"}}, ValueError, "options must map .*'heads'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(function, names, error, message):
    with pytest.raises(error, match=message):
        check(function, "softmax", **names)


def test_parameters_are_passed_as_they_have_to_be():
    def by_position(q, k, v, /, *, causal=True):
        assert causal
        return of_grouped_heads(q, k, v)

    def with_other_names(x, y, z):
        return of_grouped_heads(x, y, z)

    def of_numbers(q, k, v, scale, softcap, window=-1, dropout=0.0):
        assert (softcap, window) == (None, -1)
        return of_grouped_heads(q * scale * q.shape[-1] ** 0.5, k, v)

    plain = "outputs-torch-float64-plain-clustered-softmax"
    for function, note in (
        (by_position, ()),
        (with_other_names, ("called by position: q, k, v",)),
        (of_numbers, ("parameters that keep their defaults: dropout",)),
    ):
        result = checked(function, "softmax", checks=["outputs"])
        assert plain in {outcome.case.id for outcome in result.compared}
        assert result.passed, str(result)
        assert result.notes == note


def test_a_modules_parameters_are_those_of_its_forward():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, causal=True, key_mask=None):
            return of_grouped_heads(q, k, v)

    for module in (Attention(), torch.compile(Attention(), backend="eager")):
        backend = backend_from_function(module, "softmax")
        assert backend.parameters.options == {"causal": "causal"}
        assert backend.parameters.masks == {"key_mask"}


def lucid(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    unit = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6)
    overlap = torch.exp((unit @ unit.mT - k.shape[-1]) * k.shape[-1] ** -0.5)
    y = torch.linalg.solve_triangular(overlap.tril(), v, upper=False, unitriangular=True)
    k, y = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, y))
    return attend(q, k, y).transpose(1, 2)


def test_what_several_leaves_lack_is_named():
    result = checked(lucid, "lucid", checks=["outputs", "caching"])
    assert result.passed, str(result)
    assert {"has no parameter for key_mask", "has no parameter for a state"} <= {*result.declined}
    assert any("lengths (" in line and "window (" in line for line in str(result).splitlines())


def test_inputs_that_a_group_has_by_other_names_are_the_functions():
    def of_normalised(q, k, v):
        q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (q, k))
        return of_grouped_heads(q, k, v)

    wide = ["float64", "float32"]
    result = checked(of_normalised, "qk_norm", checks=["outputs", "gradients"], dtypes=wide)
    assert result.passed, str(result)
    assert len(result.compared) > 5


def test_options_of_the_leaf_are_those_of_a_mechanism_that_is_one():
    def laser(q, k, v, scale=None):
        return of_grouped_heads(q, k, v.exp()).log()

    backend = backend_from_function(laser, "laser")
    assert backend.parameters.options == {"scale": "scale"}
    request = pa.Request("forward", "torch", "cpu", "float64", (), frozenset())
    windowed = pa.Softmax(read="log_mean_exp", window=3, scale=0.1)
    assert backend.lacks(windowed, request) == "has no parameter for the option window"


def test_one_query_head_is_repeated_for_more_value_heads():
    arrangement = Arrangement(heads="equal")
    q, v = np.zeros((1, 3, 1, 8)), np.zeros((1, 3, 2, 8))
    arranged = arrangement.arranged(pa.parse("gated_delta").inputs, {"q": q, "v": v})
    assert arranged["q"].shape == (1, 3, 2, 8)


def test_a_function_may_have_the_name_of_a_backend():
    def reference(q, k, v):
        return of_grouped_heads(q, k, v)

    assert checked(reference, "softmax", checks=["dtypes"]).name == "reference_function"


def test_a_gradient_that_overflows_where_the_output_is_right():
    def in_parallel(q, k, v, g):
        total = g.cumsum(1).transpose(1, 2)
        decay = (total[..., :, None] - total[..., None, :]).exp()  # It is infinite for later keys.
        scores = torch.einsum("bthd,bshd->bhts", q, k) * decay
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.einsum("bhts,bshe->bthe", scores.masked_fill(later, 0), v)

    options = {"heads": "equal", "dtypes": ["float64"], "checks": ["outputs", "stability"]}
    result = checked(in_parallel, "ssd", **options)
    assert result.by_check["outputs"][:2] == (1, 0)
    assert [outcome.case.kind for outcome in result.failures] == ["extreme_gates"]
    assert result.failures[0].reason.startswith("vjp of q is off by nan")


def called_with(mechanism, shapes, **options):
    """The shapes that a function receives if it is called with arrays of these shapes."""
    found = {}

    def function(**inputs):
        found.update({name: tuple(x.shape) for name, x in inputs.items()})
        return inputs["q"]

    parsed = pa.parse(mechanism)
    backend = backend_from_function(function, mechanism, library="numpy", **options)
    x = {name: np.zeros(shape) for name, shape in shapes.items()}
    tokens = x["k"].shape[1]
    frame = full_frame(x["q"].shape[1], tokens, x["q"])
    backend.call(parsed, x, frame)
    return found


def test_one_key_head_is_repeated_for_equal_heads():
    shapes = {"q": (2, 5, 4, 8), "k": (2, 5, 1, 8), "v": (2, 5, 1, 8)}
    found = called_with("softmax", shapes, heads="equal")
    assert found == dict.fromkeys("qkv", (2, 5, 4, 8))


def test_the_steps_of_a_token_stay_behind_it_in_every_layout():
    shapes = {
        "q": (2, 5, 4, 8),
        "k": (2, 5, 2, 4, 8),
        "v": (2, 5, 2, 4, 6),
        "g": (2, 5, 4),
        "beta": (2, 5, 2, 4),
    }
    assert called_with("delta_product", shapes)["k"] == (2, 5, 2, 4, 8)
    assert called_with("delta_product", shapes, layout="bhtd")["beta"] == (2, 4, 5, 2)


def test_a_bias_is_as_the_scores_are_in_every_layout():
    shapes = {"q": (1, 5, 4, 8), "k": (1, 7, 4, 8), "v": (1, 7, 4, 8), "bias": (1, 4, 5, 7)}
    for layout in ("bthd", "bhtd"):
        found = called_with("softmax[bias=true]", shapes, layout=layout)
        assert found["bias"] == (1, 4, 5, 7)


def test_narrow_values_and_their_state_are_widened_for_equal_widths():
    def equal_widths(q, k, v, *more, **states):
        assert q.shape[-1] == v.shape[-1], "widths differ"
        return chunk_kda(q, k, v, *more, **states)

    equal_widths.__signature__ = inspect.signature(chunk_kda)
    checks = ["stability", "splits"]
    declined = checked(equal_widths, "kda", heads="equal", checks=checks)
    widened = checked(equal_widths, "kda", heads="equal", widths="equal", checks=checks)
    assert "raised AssertionError: widths differ" in declined.declined
    assert any('with widths="equal", zeros' in note for note in declined.notes)
    assert not any("widths" in note for note in widened.notes)
    assert widened.passed, str(widened)
    assert widened.by_check["stability"][0] > declined.by_check["stability"][0]
    assert widened.by_check["splits"][0] > 0


def test_a_multiple_of_tokens_declines_fewer_queries_than_keys():
    shapes = {"q": (1, 5, 4, 8), "k": (1, 7, 4, 8), "v": (1, 7, 4, 8)}
    with pytest.raises(ValueError, match="takes a multiple of 8 tokens, of all inputs alike"):
        called_with("softmax", shapes, multiple=8)


def test_a_norm_around_a_mechanism_passes_queries_and_keys_by_their_names():
    def normed(q, k, v):
        return attend(*(x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() for x in (q, k)), v)

    result = checked(normed, "qk_norm", layout="bhtd", heads="equal", checks=["outputs"])
    assert result.passed, str(result)


def test_a_mechanism_with_a_query_for_each_key_is_called():
    def function(q, k, v, beta):
        raise ValueError("called")

    with pytest.raises(TypeError, match="torch: raised ValueError: called"):
        backend_from_function(function, "deltaformer")


def test_keyword_arguments_named_state_are_no_state():
    def function(q, k, v, beta, **state):
        return v

    assert backend_from_function(function, "delta", library="torch").parameters.state is None


def test_a_recurrence_is_not_diagnosed_with_fewer_queries_than_keys():
    assert not diagnosis(backend_from_function(chunk_kda, "kda", heads="equal"))


@pytest.mark.parametrize("hides", [False, True])
def test_a_nan_has_to_reach_the_sequences_that_depend_on_it(hides):
    expression = "nystrom[landmarks=3,start=batch]"

    def from_the_batch(q, k, v):
        q, k, v = (x.nan_to_num() if hides else x for x in (q, k, v))
        return pa.parse(expression)(q, k, v, backend="reference")

    result = checked(from_the_batch, expression, checks=["future"], gradient=False)
    reasons = [outcome.reason for outcome in result.failures]
    assert result.compared
    assert all("finite: something replaces NaN" in reason for reason in reasons)
    assert bool(reasons) == hides
