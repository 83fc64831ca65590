"""Mesa's query by Triton's kernels against its definition, which factorizes, interpreted."""

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.spec.positive_definite import NotSolvedError
from precondattn_triton import Triton
from precondattn_triton.configurations import Configuration
from precondattn_triton.recurrence import mesa_query
from tests.backends.triton.test_recurrences import BACKENDS, CHUNKS_OF_32, check, problem
from tests.backends.triton.tiles import error, small_tiles

LEAF = pa.MesaQuery(decay="head", beta=True)
HALF_CHUNKS = {**CHUNKS_OF_32, "mesa_query": Configuration(16, 16)}


def inputs(layer, t, **options):
    x = problem(layer, t, **options)
    x["lam_mesa"] = 0.25 + torch.rand_like(x["lam_mesa"])
    if "beta_mesa" in x:
        x["beta_mesa"] = torch.rand_like(x["beta_mesa"])
    return x


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "t", "dtype"),
    [
        ("mesa", 33, torch.float32),
        ("mesa[beta=true]", 17, torch.bfloat16),
        ("mesa[beta=true](gla)", 16, torch.float16),
        ("mesa(retention)", 17, torch.float32),
        ("mesa(linear)", 1, torch.float32),
        ("mesa[decay=false](gated_delta)", 17, torch.float32),
    ],
)
def test_bases(layer, t, dtype):
    layer = pa.parse(layer)
    # The definition gets the rounded inputs, and solves exactly.
    check(layer, inputs(layer, t), dtype, bound=1e-5 if dtype == torch.float32 else None)


@pytest.mark.parametrize("keys", ["clustered", "equal", "zero"])
def test_keys_that_coincide_and_extreme_gates(keys):
    x = inputs(LEAF, 40, keys=keys, heads=(1, 1), gates="extreme")
    check(LEAF, x, bound=2e-5, tiles=HALF_CHUNKS)


@pytest.mark.thorough
def test_several_queries_of_a_state_and_another_ridge_for_each():
    check(LEAF, inputs(LEAF, 40, d=20, heads=(1, 3)), bound=1e-5, tiles=HALF_CHUNKS)


@pytest.mark.thorough
@pytest.mark.parametrize("decay", ["none", "retention"])
def test_one_state_for_several_heads_and_padded_sequences(decay):
    leaf = pa.MesaQuery(decay=decay)
    x = inputs(leaf, 19, b=2, heads=(1, 2))
    check(leaf, x, bound=1e-5, lengths=torch.tensor([19, 6]))


@pytest.mark.thorough
def test_packed_sequences_have_a_sum_of_their_own():
    x = inputs(LEAF, 40)
    ids = torch.tensor([[0] * 13 + [1] * 10 + [2] * 17])
    check(LEAF, x, bound=1e-5, segment_ids=ids)


@pytest.mark.parametrize(("t", "s"), [(5, 37), (16, 32), (1, 1)])
def test_few_queries_after_a_state(t, s):
    x = inputs(LEAF, s, heads=(2, 2))
    x["q"] = x["q"][:, -t:]
    root = torch.randn(1, 2, 12, 12)
    moment = root @ root.mT
    exact = {name: array.double() for name, array in x.items()}
    expected = LEAF.run({"moment": moment.double()}, exact, Frame(None, None))
    form = Triton().kernels(LEAF).form(LEAF, x, Frame(None, None))
    with small_tiles():
        out, final = LEAF.run({"moment": moment}, x, Frame(None, None), form)
    assert error(out, expected[0]) < 1e-5
    assert error(final["moment"], expected[1]["moment"]) < 1e-5


def test_a_query_that_is_not_solved_is_an_error_with_its_residual():
    leaf = pa.MesaQuery(decay="head", beta=True, iterations=2)
    with small_tiles(), pytest.raises(NotSolvedError, match="after 2 iterations"):
        leaf(**inputs(leaf, 40), backend=BACKENDS)


def test_a_query_that_is_not_solved_is_nan_while_a_cuda_graph_captures(monkeypatch):
    monkeypatch.setattr(mesa_query, "is_traced", lambda residuals: True)
    leaf, x = pa.MesaQuery(decay="head", beta=True, iterations=2), inputs(LEAF, 20, heads=(1, 1))
    x["k"][:, :9] = 0.0  # Diagonal systems are solved at once.
    with small_tiles():
        out = leaf(**x, backend=BACKENDS)
    torch.testing.assert_close(out[:, :9], x["q"][:, :9] / x["lam_mesa"])
    assert out[:, 9:].isnan().all()


@pytest.mark.thorough
def test_a_residual_that_has_drifted_from_that_of_the_recurrence_is_solved_for(monkeypatch):
    leaf = pa.MesaQuery(tolerance=2e-6)
    x = inputs(leaf, 40, d=20, keys="clustered", heads=(1, 1))
    # Without an allowance for rounding it has always drifted too far.
    monkeypatch.setattr(mesa_query, "ROUNDINGS", 0.0)
    check(leaf, x, bound=1e-5)


def test_a_query_of_nan_is_nan_and_stops():
    x = inputs(LEAF, 20, heads=(1, 1))
    x["q"][0, 7] = np.nan
    with small_tiles():
        out = LEAF(**x, backend=BACKENDS)
    assert out[0, 7].isnan().all()
    assert out[0, 8:].isfinite().all()


def test_wide_keys_are_declined():
    shapes = (("q", (1, 4, 1, 160)), ("k", (1, 4, 1, 160)))
    request = Request("vjp", "torch", "cpu", "float32", shapes, frozenset())
    assert "d <= 128; found d=160" in Triton().refusal(LEAF, request)
