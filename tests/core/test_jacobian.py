"""The norm of the Jacobian of an output with respect to queries, keys and other inputs.

Closed forms of softmax attention and of LASER (Eq. 5 and 7) are computed here with NumPy; other
Jacobians by central differences, and by PyTorch's autograd through the definition.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import dtype_name
from precondattn_conformance.inputs import numbers_in_range
from tests.core.in_every_library import LIBRARIES, assert_same_in
from tests.mathematics.attention_problems import logits
from tests.mathematics.identities import assert_close, causal_mask

norms = pa.diagnostics.jacobian_norms
KINDS = ("random", "clustered", "equal", "some zero")
SIZES = {"b": 2, "t": 5, "s": 5, "h": 4, "n": 2, "u": 4, "d": 3, "e": 2, "m": 3}


def problem(kind="random", t=5):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((2, t, 4, 3), (2, 5, 2, 3), (2, 5, 2, 2)))
    if kind == "clustered":
        k = k[:, np.arange(5) % 2] + 1e-3 * rng.normal(size=k.shape)
    elif kind == "equal":
        k[:] = k[:, :1]
    elif kind == "some zero":
        k[:, [0, 3]] = 0
    return q, k, v


@pytest.mark.parametrize("laser", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_of_softmax_and_laser_they_are_closed_forms(kind, laser):
    """∂o_c/∂s_j is a_j (v_jc − o_c), and for LASER w_jc − a_j with w_jc = a_j exp(v_jc − o_c)."""
    q, k, v = problem(kind, t=3)
    scores = logits(q, k)
    scores[..., ~causal_mask(3, 5)] = -np.inf
    a = np.exp(scores)
    a /= a.sum(-1, keepdims=True)
    attn = pa.Laser() if laser else pa.Softmax()
    found = norms(attn, q, k, v, of=("q", "k", "v"))
    for b, t, h in np.ndindex(2, 3, 4):
        keys, values, of = k[b, :, h // 2], v[b, :, h // 2], a[b, h, t, :, None]
        if laser:
            posterior = of * np.exp(values)
            posterior /= posterior.sum(0)
            by_score, by_value = posterior - of, posterior
        else:
            by_score, by_value = of * (values - np.sum(of * values, axis=0)), np.tile(of, 2)
        by_score = by_score / np.sqrt(3)
        expected = {
            "q": np.linalg.norm(by_score.T @ keys),
            "k": np.linalg.norm(by_score) * np.linalg.norm(q[b, t, h]),
            "v": np.linalg.norm(by_value),
        }
        for name, norm in expected.items():
            assert_close(found[name][b, t, h], norm, size=1)


@pytest.mark.parametrize("kind", KINDS)
def test_of_lucid_they_are_those_by_autograd_through_the_definition(kind):
    torch = pytest.importorskip("torch")
    q, k, v = problem(kind)
    found = norms(pa.Lucid(), q, k, v)

    def lucid(q, k, v):  # LUCID for one sequence and head.
        unit = 3**0.5 * k / (k.square().sum(-1, keepdim=True) + 3e-6).sqrt()
        phi = torch.exp(unit @ unit.T / 3**0.5 - 3**0.5).tril(-1)
        y = torch.linalg.solve(torch.eye(5, dtype=torch.float64) + phi, v)
        masked = (q @ k.T / 3**0.5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
        return masked.softmax(-1) @ y

    for b, h in np.ndindex(2, 4):
        one = [torch.asarray(x) for x in (q[b, :, h], k[b, :, h // 2], v[b, :, h // 2])]
        of_q, of_k, _ = torch.autograd.functional.jacobian(lucid, tuple(one))
        for name, jacobian in (("q", of_q), ("k", of_k)):
            expected = jacobian.square().sum((1, 2, 3)).sqrt().numpy()
            assert_close(found[name][b, :, h], expected, size=np.abs(expected).max() + 1)


@pytest.mark.parametrize(
    "text", ["gated_delta", "ccq(gla)", "differential", "row_normalized", "gsa"]
)
def test_of_other_mechanisms_they_are_those_by_central_differences(text):
    mechanism = pa.parse(text)
    rng, sizes = np.random.default_rng(0), SIZES | {"b": 1, "t": 4, "s": 4}
    x = {
        name: numbers_in_range(rng, pattern, pattern.shape(sizes))
        for name, pattern in mechanism.inputs.items()
    }
    found = norms(mechanism, **x)
    # The row norm's lengths are constant for its gradient.
    base = mechanism.base if text == "row_normalized" else mechanism
    lengths = np.linalg.norm(base(**x), axis=-1) if text == "row_normalized" else 1
    for name in ("q", "k"):
        expected = by_differences(base, x, name) / lengths
        np.testing.assert_allclose(found[name], expected, atol=1e-7 * (1 + expected.max()))


def by_differences(mechanism, x, name, step=1e-5):
    squares = 0.0
    for index in np.ndindex(x[name].shape):
        ends = []
        for sign in (1, -1):
            moved = x[name].copy()
            moved[index] += sign * step
            ends.append(mechanism(**(x | {name: moved})))
        squares += np.sum(((ends[0] - ends[1]) / (2 * step)) ** 2, axis=-1)
    return np.sqrt(squares)


def test_chosen_tokens_have_the_norms_of_all_and_masked_keys_have_none():
    q, k, v = problem()
    every = norms(pa.Lucid(), q, k, v)
    some = norms(pa.Lucid(), q, k, v, tokens=(4, 1))
    for name, norm in every.items():
        assert norm.shape == (2, 5, 4)
        np.testing.assert_array_equal(some[name], norm[:, [4, 1]])
    only_first = np.arange(5)[None] < np.asarray([[1], [5]])
    masked = norms(pa.Lucid(), q, k, v, key_mask=only_first)
    assert np.all(masked["k"][0] == 0)  # Attention to one key does not depend on it.
    assert_close(masked["k"][1], every["k"][1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_equal_results_in_its_own_arrays(library):
    given = problem(t=2)
    for name in ("q", "k"):
        function = lambda *x, name=name: norms(pa.Lucid(), *x, tokens=(1,))[name]  # noqa: E731
        assert_same_in(library, function, *given)


def test_half_precision_is_computed_in_float32():
    torch = pytest.importorskip("torch")
    narrow = [torch.asarray(x).to(torch.bfloat16) for x in problem()]
    found = norms(pa.Lucid(), *narrow)
    expected = norms(pa.Lucid(), *(x.double() for x in narrow))
    for name in ("q", "k"):
        assert dtype_name(found[name]) == "float32"
        assert (found[name] - expected[name]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"of": "qk"}, r"of must be names of inputs of per_dim_scale.*, among q, k, v; found 'qk'"),
        ({"of": ()}, "of must be names"),
        ({"of": ("per_dim",)}, r"found \('per_dim',\)"),
        ({"tokens": (5,)}, r"tokens must be whole numbers from 0 to t - 1 = 4; found \(5,\)"),
        ({"tokens": (-1,)}, r"found \(-1,\)"),
        ({"tokens": ()}, "tokens must be whole numbers"),
    ],
)
def test_names_and_tokens_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        norms(pa.PerDimScale(), *problem(), per_dim=np.ones(3), **wrong)


def test_several_sequences_that_depend_on_each_other_are_refused():
    q, k, v = problem()
    attn = pa.Nystrom(2, start="batch")
    with pytest.raises(ValueError, match="the output of a sequence depends on the others"):
        norms(attn, q, k, v)
    assert norms(attn, q[:1], k[:1], v[:1], tokens=(0,))["q"].shape == (1, 1, 4)
