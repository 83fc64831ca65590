"""Differential attention against identities that hold for any implementation.

The definition is o = f(q, k, v) − λ f(q2, k2, v), f being the base and λ one number, one for each
head, or one for each token and head. Outputs and gradients are compared in
`test_definitions.py`. Everything is float64, and an identity has to hold to 1e-10 of the largest
number involved.
"""

import numpy as np
import pytest
from hypothesis import given

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem, problems

PER = ("layer", "head", "token")


# Values of λ


@pytest.mark.parametrize("layer", ["differential", "differential[per=token](lucid(laser))"])
@given(p=problems())
def test_equal_maps_with_lambda_of_one_cancel_exactly(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    x |= {f"{name}2": x[name] for name in layer.paired} | {"lam": np.ones_like(x["lam"])}
    assert np.all(layer(**x) == 0)


# What the maps share


def test_the_two_maps_share_what_is_not_paired():
    for text, own, second in [
        ("differential", "q k v", "q2 k2"),
        ("differential[paired=q]", "q k v", "q2"),
        ("differential[paired=k]", "q k v", "k2"),
        ("differential(laser)", "q k v", "q2 k2"),
        ("differential(path)", "q k v w beta", "q2 k2"),
        ("differential[paired=q/k/w/beta](path)", "q k v w beta", "q2 k2 w2 beta2"),
        ("differential(temperature)", "q k v tau", "q2 k2"),
        ("differential[paired=q/k/tau](temperature)", "q k v tau", "q2 k2 tau2"),
    ]:
        assert set(pa.parse(text).inputs) == {*own.split(), *second.split(), "lam"}


# LASER


@pytest.mark.parametrize("per", PER)
def test_over_laser_values_hundreds_apart_give_finite_and_exact_outputs(per):
    p, layer = Problem(s=7, t=5, n=2, group=2), pa.Differential(pa.Laser(), per=per)
    v = p.v + p.rng.choice([-700.0, -300.0, 0.0, 300.0, 700.0], size=p.v.shape)
    assert_is_defined(layer, p.x(layer, v=v), 10)


# Caches


@pytest.mark.parametrize(
    ("layer", "stored"),
    [
        ("differential", ["k", "k2", "v"]),
        ("differential[per=token]", ["k", "k2", "v"]),
        ("differential(laser)", ["k", "k2", "v"]),
        ("differential[paired=q]", ["k", "v"]),
        ("differential[paired=k]", ["k", "k2", "v"]),
    ],
)
def test_the_cache_holds_what_the_maps_share_once(layer, stored):
    p, layer = Problem(s=4), pa.parse(layer)
    assert sorted(layer.init_cache(**p.x(layer), capacity=4).store) == stored


def test_the_cache_of_lucid_and_path_holds_what_each_map_needs():
    p = Problem(s=4)
    stores = {
        text: pa.parse(text).init_cache(**p.x(pa.parse(text)), capacity=4).store
        for text in [
            "differential(lucid)",
            "differential[paired=q](lucid)",
            "differential(path)",
            "differential[paired=q](path)",
        ]
    }
    widths = {
        text: sorted(buffer.shape[-1] for buffer in store.values() if buffer.ndim == 4)
        for text, store in stores.items()
    }
    assert widths["differential(lucid)"] == [2, 2, 3, 3]  # y, y₂, k, k₂
    assert widths["differential[paired=q](lucid)"] == [2, 3]  # One solve, read twice.
    assert widths["differential(path)"] == [2, 3, 3]
    assert widths["differential[paired=q](path)"] == [2, 3]


# Construction and text


@pytest.mark.parametrize("per", PER)
def test_a_lambda_of_another_shape_is_refused(per):
    p, layer = Problem(s=4, n=3), pa.Differential(per=per)
    for other in PER:
        if other != per:
            with pytest.raises(pa.ShapeError, match="lam"):
                layer(
                    **p.x(layer, lam=np.ones({"layer": (), "head": 3, "token": (2, 4, 3)}[other]))
                )


def test_text_omits_defaults_and_contains_the_paired_names():
    assert str(pa.Differential()) == "differential"
    assert str(pa.Differential(per="head", paired=("q", "k"))) == "differential[per=head]"
    assert str(pa.Differential(paired=("q",))) == "differential[paired=q]"
    everything = pa.Differential(pa.Path(), paired=("q", "k", "w", "beta"))
    assert str(everything) == "differential[paired=q/k/w/beta](path)"
    assert pa.parse("differential[paired=q/k/w/beta](path)") == everything
    assert pa.parse("differential[paired=q/k]") == pa.Differential()


# Pairs of heads


PAIRS = {"adjacent": lambda i, h: (2 * i, 2 * i + 1), "halves": lambda i, h: (i, i + h)}


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_heads_split_by_their_layout(layout, pairs):
    x = np.arange(2 * 3 * 2 * pairs * 5.0).reshape(2, 3, 2 * pairs, 5)
    first, second = pa.split_heads(x, layout)
    assert first.shape == second.shape == (2, 3, pairs, 5)
    for i in range(pairs):
        one, other = PAIRS[layout](i, pairs)
        np.testing.assert_array_equal(first[:, :, i], x[:, :, one])
        np.testing.assert_array_equal(second[:, :, i], x[:, :, other])


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_values_of_a_pair_are_concatenated(layout, pairs):
    v = np.arange(2 * 3 * 2 * pairs * 5.0).reshape(2, 3, 2 * pairs, 5)
    paired = pa.pair_values(v, layout)
    assert paired.shape == (2, 3, pairs, 10)
    for i in range(pairs):
        one, other = PAIRS[layout](i, pairs)
        np.testing.assert_array_equal(paired[:, :, i, :5], v[:, :, one])
        np.testing.assert_array_equal(paired[:, :, i, 5:], v[:, :, other])


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_heads_of_other_libraries_split_alike_and_keep_their_library(layout, library):
    torch = pytest.importorskip("torch")
    jax_numpy = pytest.importorskip("jax.numpy")
    make, kind = {
        "torch": (torch.asarray, torch.Tensor),
        "jax": (jax_numpy.asarray, jax_numpy.ndarray),
    }[library]
    x = np.arange(48.0).reshape(1, 2, 6, 4)
    result = [*pa.split_heads(make(x), layout), pa.pair_values(make(x), layout)]
    expected = [*pa.split_heads(x, layout), pa.pair_values(x, layout)]
    for theirs, ours in zip(result, expected, strict=True):
        assert isinstance(theirs, kind)
        np.testing.assert_array_equal(np.asarray(theirs), ours)


def test_torch_differentiates_through_the_pairs():
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0, dtype=torch.float64).reshape(1, 2, 4, 3).requires_grad_()
    first, second = pa.split_heads(x, "adjacent")
    (first - 2 * second).sum().backward()
    np.testing.assert_array_equal(x.grad[0, 0, :, 0], [1, -2, 1, -2])


@pytest.mark.parametrize("layout", PAIRS)
def test_grouped_heads_pair_as_queries_and_keys_of_one_pair(layout):
    """Pair i of four reads key/value pair ⌊i/2⌋ of two: eight query heads, four key/value heads."""
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.normal(size=(1, 5, heads, 3)) for heads in (8, 4, 4))
    (q, q2), (k, k2) = pa.split_heads(queries, layout), pa.split_heads(keys, layout)
    out = pa.Differential()(q, k, pa.pair_values(values, layout), q2=q2, k2=k2, lam=np.asarray(0.7))
    assert out.shape == (1, 5, 4, 6)
    for i in range(4):
        heads, shared = PAIRS[layout](i, 4), PAIRS[layout](i // 2, 2)
        v = np.concatenate([values[:, :, [j]] for j in shared], axis=-1)
        first, second = (
            pa.Softmax()(queries[:, :, [head]], keys[:, :, [j]], v)
            for head, j in zip(heads, shared, strict=True)
        )
        assert_close(out[:, :, [i]], first - 0.7 * second, size=10)


@pytest.mark.parametrize("function", [pa.split_heads, pa.pair_values])
def test_arrays_without_pairs_of_heads_are_refused(function):
    x = np.zeros((1, 2, 4, 3))
    with pytest.raises(ValueError, match=r"even number of heads; found \(1, 2, 3, 3\)"):
        function(x[:, :, :3], "halves")
    with pytest.raises(ValueError, match=r"shape \(b, t, 2h, d\).*found \(2, 4, 3\)"):
        function(x[0], "adjacent")
    with pytest.raises(ValueError, match="layout must be 'adjacent' or 'halves'; found 'pairs'"):
        function(x, "pairs")
    with pytest.raises(TypeError, match="list"):
        function(x.tolist(), "halves")
    with pytest.raises(TypeError):
        function(x)
