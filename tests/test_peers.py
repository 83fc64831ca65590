"""The oracle against what public implementations computed; `peers/make_fixtures.py` froze it.

Each peer computes in float32, at least inside, which bounds the agreement that can be asked for.
"""

from pathlib import Path

import numpy as np
import pytest

import precondattn as pa

PEERS = Path(__file__).parent / "peers"
PATH_INPUTS = ["q", "k", "v", "w", "beta", "g"]


def distance(actual, expected):
    """The largest difference, relative to the largest expected number."""
    assert actual.shape == expected.shape
    return np.abs(actual - expected).max() / np.abs(expected).max()


# DiffLlama of Transformers


@pytest.fixture(scope="module")
def diffllama():
    with np.load(PEERS / "differential_diffllama.npz") as entries:
        return dict(entries)


def differential_of(entries, layout):
    q, q2 = pa.split_heads(entries["q"], layout)
    k, k2 = pa.split_heads(entries["k"], layout)
    layer = pa.Differential(pa.Softmax(scale=float(entries["scale"])))
    return layer(q, k, pa.pair_values(entries["v"], layout), q2=q2, k2=k2, lam=entries["lam"])


def test_differential_attention_is_that_of_diffllama(diffllama):
    assert 0.05 < diffllama["lam"] < 5  # A second map that matters.
    assert distance(differential_of(diffllama, "halves"), diffllama["difference"]) <= 1e-6


def test_the_other_pairing_of_heads_is_another_function(diffllama):
    assert distance(differential_of(diffllama, "adjacent"), diffllama["difference"]) > 0.1


def test_what_diffllama_has_behind_the_difference_is_a_group_norm(diffllama):
    o = differential_of(diffllama, "halves")
    normed = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + 1e-5)
    expected = (1 - diffllama["lambda_init"]) * normed.reshape(*o.shape[:2], -1)
    assert distance(expected, diffllama["before_o_proj"]) <= 1e-6


# PaTH of flash-linear-attention


@pytest.fixture(scope="module")
def path_fla():
    with np.load(PEERS / "path_fla.npz") as entries:
        return dict(entries)


def of_case(entries, case):
    """The inputs in float64, and everything else of one case."""
    own = {name.removeprefix(f"{case}_"): x for name, x in entries.items() if name.startswith(case)}
    return {name: own[name].astype(np.float64) for name in PATH_INPUTS}, own


def assert_agrees(own, out, gradients):
    assert distance(out, own["out"]) <= 2e-6
    for name, gradient in gradients.items():
        assert distance(gradient, own[f"grad_{name}"]) <= 2e-5, name


@pytest.mark.parametrize("case", ["gqa", "odd", "gate"])
def test_path_is_that_of_flash_linear_attention(path_fla, case):
    x, own = of_case(path_fla, case)
    layer = pa.Path(scale=float(own["scale"]), forget="scaled")
    out, pullback = layer.vjp(**x)
    gradients = pullback(own["cotangent"].astype(np.float64))
    assert sorted(gradients) == sorted(PATH_INPUTS)
    assert_agrees(own, out, gradients)


@pytest.mark.parametrize("case", ["gqa", "odd", "gate"])
def test_a_gate_outside_the_scale_is_the_gate_inside_it_times_the_scale(path_fla, case):
    x, own = of_case(path_fla, case)
    scale = float(own["scale"])
    x["g"] = scale * x["g"]
    out, pullback = pa.Path(scale=scale, forget="unscaled").vjp(**x)
    gradients = pullback(own["cotangent"].astype(np.float64))
    assert_agrees(own, out, gradients | {"g": scale * gradients["g"]})


def test_a_gate_on_the_other_side_of_the_scale_is_another_function(path_fla):
    x, own = of_case(path_fla, "gate")
    out = pa.Path(scale=float(own["scale"]), forget="unscaled")(**x)
    assert distance(out, own["out"]) > 1e-2


@pytest.mark.parametrize("case", ["gqa", "odd"])
def test_path_without_a_gate_is_that_with_an_open_one(path_fla, case):
    x, own = of_case(path_fla, case)
    assert np.all(x.pop("g") == 0)
    out, pullback = pa.Path(scale=float(own["scale"])).vjp(**x)
    assert_agrees(own, out, pullback(own["cotangent"].astype(np.float64)))


@pytest.mark.parametrize("case", ["gqa", "odd", "gate"])
def test_the_reflections_matter(path_fla, case):
    x, own = of_case(path_fla, case)
    x["beta"] = 0 * x["beta"]
    out = pa.Path(scale=float(own["scale"]), forget="scaled")(**x)
    assert distance(out, own["out"]) > 0.1
