"""Half-precision bounds: the rounding of the industry's kernels meets them, more does not."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import precondattn as pa  # noqa: E402
from precondattn.spec.recurrence import RECURRENT, Stream  # noqa: E402
from precondattn_conformance.cases import case_of  # noqa: E402
from precondattn_conformance.rounding.attention import RoundedMean, rounded_attention  # noqa: E402
from precondattn_conformance.rounding.delta_rule import RoundedDeltaRule  # noqa: E402
from precondattn_conformance.runner import run_case  # noqa: E402
from precondattn_conformance.status import FAILED, PASSED  # noqa: E402
from precondattn_conformance.tolerance import bound  # noqa: E402
from tests.conformance import rounding_models as backends  # noqa: E402

ATTENTION = ("softmax", "differential", "lucid", "lucid_solve", "laser", "path")
RECURRENCES = ("delta", "gated_delta")
DTYPES = ("float16", "bfloat16")
DATA = (
    *("plain-clustered", "plain-duplicate", "packed-zero", "block_less_one-clustered"),
    "real_short-real",
)
PACKED = "packed-zero"
COHERENT = "b2t53s53h4n2d16e16u2block16.lengths_apart.expanded_tokens"
"""A layout with one β, one gate and one cotangent for all tokens, so that errors add up."""


@pytest.fixture(autouse=True, scope="module")
def registered():
    for backend in (backends.FlashAttention, backends.FlashLinearAttention):
        pa.register_backend(backend)
    yield
    for backend in (backends.FlashAttention, backends.FlashLinearAttention):
        pa.unregister_backend(backend.name)


def outcome(name):
    """The outcome of a case on the rounding model; the reference computes what the model lacks."""
    case = case_of(name)
    is_recurrent = case.mechanism.partition("[")[0] in RECURRENCES
    model = backends.FlashLinearAttention if is_recurrent else backends.FlashAttention
    return run_case(case, (model.name, "reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mechanism", ATTENTION + RECURRENCES)
def test_the_models_meet_every_bound(mechanism, dtype):
    names = [f"gradients-torch-{dtype}-{data}-{mechanism}" for data in DATA]
    if mechanism in RECURRENCES:
        names += [f"states-torch-{dtype}-{data}-{mechanism}" for data in DATA if data != PACKED]
        layouts = ("written_twice", "written_far")
        names += [f"stability-torch-{dtype}-{layout}-overwritten-{mechanism}" for layout in layouts]
    elif mechanism in ("softmax", "lucid"):
        kinds = ("huge_logits", "long_keys", "far_below")
        names += [f"stability-torch-{dtype}-block_and_one-{kind}-{mechanism}" for kind in kinds]
    failed = [o.reason for o in map(outcome, names) if o.status != PASSED]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(
    "name",
    [
        "gradients-torch-bfloat16-block_less_one-clustered-softmax",
        "gradients-torch-float16-block_less_one-clustered-softmax",
        "gradients-torch-bfloat16-fewer_queries-clustered-differential",
        "gradients-torch-bfloat16-block_less_one-clustered-laser",
        "gradients-torch-float16-block_and_one-clustered-lucid_solve",
        f"gradients-torch-float16-{COHERENT}-clustered-gated_delta",
        "outputs-torch-bfloat16-b1t1s64h1n1d5e256block64.segments_edge.every_other_element-duplicate-delta",
    ],
)
def test_a_bound_that_exceeds_the_usual_is_twice_the_error_of_the_model(name):
    """The suite's model, in NumPy, has the same error as the backend of PyTorch."""
    found = outcome(name)
    assert found.status == PASSED, found.text
    error, allowed = found.measured.error, found.measured.bound
    assert error > bound(found.case.dtype, found.case.kind)
    assert allowed == pytest.approx(2 * error, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mechanism", RECURRENCES)
def test_a_state_that_is_rounded_at_the_borders_of_chunks_fails(monkeypatch, mechanism, dtype):
    monkeypatch.setattr(backends.FlashLinearAttention, "form", backends.RoundedStates)
    found = outcome(f"stability-torch-{dtype}-written_far-overwritten-{mechanism}")
    assert found.status == FAILED
    assert "the output is off by" in found.reason


def sums_in_half_precision(read, log_weights, log_total, v):
    """P v with the sum rounded after each tile of 16 keys."""
    weights = read.rounding(log_weights.exp())
    total = torch.zeros(1)
    for j in range(0, v.shape[2], 16):
        total = read.rounding(total + weights[..., j : j + 16] @ v[..., j : j + 16, :])
    return total


def scores_in_half_precision(read, log_weights, log_total, v):
    rounded = read.rounding(log_weights + log_total) - log_total
    return RoundedMean.forward(read, rounded, log_total, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("forward", "data"),
    [
        (sums_in_half_precision, "last_of_161-opposite_values"),
        (scores_in_half_precision, "block_and_one-huge_logits"),
    ],
)
def test_sums_or_scores_in_half_precision_fail(monkeypatch, forward, data, dtype):
    name = f"stability-torch-{dtype}-{data}-softmax"
    assert outcome(name).status == PASSED
    faulty = type("Faulty", (RoundedMean,), {"forward": forward})

    def model(leaf, rounding):
        leaf = rounded_attention(leaf, rounding)
        object.__setattr__(leaf, "read", faulty(rounding))
        return leaf

    monkeypatch.setattr(backends, "rounded_attention", model)
    assert outcome(name).status == FAILED


@pytest.mark.parametrize(("s", "t", "r"), [(130, 130, 2), (64, 1, 1), (7, 5, 3)])
def test_the_model_of_the_delta_rule_is_the_recurrence_where_nothing_is_rounded(s, t, r):
    rng = np.random.default_rng(0)
    b, m, d, e = 2, 2, 5, 3
    k = rng.normal(size=(b, m, s, d))
    k /= np.linalg.vector_norm(k, axis=-1, keepdims=True)
    g = -rng.exponential(size=(b, m, s, 1, 1))
    g[:, :, 3] = -np.inf
    q, v, beta = (rng.uniform(-1, 1, size=(b, m, *size)) for size in ((t, r, d), (s, e), (s,)))
    x, state = Stream(q, k, v, g, np.abs(beta)), rng.normal(size=(b, m, d, e))
    d_o, d_final = rng.normal(size=(b, m, t, r, e)), rng.normal(size=(b, m, d, e))
    model = RoundedDeltaRule(lambda array: array, scale=1.0)
    for found, expected in zip(model.forward(x, state), RECURRENT.forward(x, state), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    found, expected = (form.vjp(x, state, d_o, d_final) for form in (model, RECURRENT))
    assert found.stream[5:] == expected.stream[5:] == (None, None)
    for one, other in zip(
        (*found.stream[:5], found.state), (*expected.stream[:5], expected.state), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-9)
