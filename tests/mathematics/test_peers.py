"""The reference against results of public implementations, saved by `peers/make_fixtures.py`.

Each peer computes in float32, at least inside, which limits the agreement that can be required.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.peers.entries import saved_entries
from tests.mathematics.peers.make_fixtures import RECURRENCES

PATH_INPUTS = ["q", "k", "v", "w", "beta", "g"]


def distance(actual, expected):
    """The largest difference, relative to the largest expected number."""
    assert actual.shape == expected.shape
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module")
def diffllama():
    return saved_entries("differential_diffllama")


def differential_of(entries, layout):
    q, q2 = pa.split_heads(entries["q"], layout)
    k, k2 = pa.split_heads(entries["k"], layout)
    layer = pa.Differential(pa.Softmax(scale=float(entries["scale"])))
    return layer(q, k, pa.pair_values(entries["v"], layout), q2=q2, k2=k2, lam=entries["lam"])


def test_differential_attention_equals_that_of_diffllama(diffllama):
    assert 0.05 < diffllama["lam"] < 5  # The second map matters.
    assert distance(differential_of(diffllama, "halves"), diffllama["difference"]) <= 1e-6


def test_diffllama_applies_a_group_norm_after_the_difference(diffllama):
    o = differential_of(diffllama, "halves")
    normed = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + 1e-5)
    expected = (1 - diffllama["lambda_init"]) * normed.reshape(*o.shape[:2], -1)
    assert distance(expected, diffllama["before_o_proj"]) <= 1e-6


@pytest.fixture(scope="module")
def path_fla():
    return saved_entries("path_fla")


def of_case(entries, case):
    """The inputs in float64, and all entries of one case."""
    saved = {
        name.removeprefix(f"{case}_"): x for name, x in entries.items() if name.startswith(case)
    }
    return {name: saved[name].astype(np.float64) for name in PATH_INPUTS}, saved


@pytest.mark.parametrize("forget", ["scaled", "unscaled", "none"])
@pytest.mark.parametrize("case", ["gqa", "odd", "gate"])
def test_path_is_that_of_flash_linear_attention(path_fla, case, forget):
    """A gate outside the scale is the gate inside it times the scale; an open one is none."""
    x, saved = of_case(path_fla, case)
    scale = float(saved["scale"])
    factor = scale if forget == "unscaled" else 1.0
    x["g"] = factor * x["g"]
    if forget == "none":
        gate = x.pop("g")
        if gate.any():
            assert distance(pa.Path(scale=scale)(**x), saved["out"]) > 1e-2
            return
    out, pullback = pa.Path(scale=scale, forget=forget).vjp(**x)
    gradients = pullback(saved["cotangent"].astype(np.float64))
    assert gradients.keys() == x.keys()
    if "g" in gradients:
        gradients |= {"g": factor * gradients["g"]}
    assert distance(out, saved["out"]) <= 2e-6
    for name, gradient in gradients.items():
        assert distance(gradient, saved[f"grad_{name}"]) <= 2e-5, name


FLA = {case: pa.parse(text) for _, cases in RECURRENCES.values() for case, text in cases.items()}
NAMES = {case: name for name, (_, cases) in RECURRENCES.items() for case in cases}
QWEN3_NEXT = pa.parse("qk_norm[norm=l2](gated_delta)")


def entries_of(peer, case):
    """The entries of one case, in float64."""
    return {
        name.removeprefix(f"{case}_"): x.astype(np.float64)
        for name, x in saved_entries(peer).items()
        if name.startswith(f"{case}_")
    }


def inputs_of(saved):
    """The inputs among the entries of a case: those that have gradients, but for the states."""
    return {
        name: x
        for name, x in saved.items()
        if f"grad_{name}" in saved and not name.startswith("initial_")
    }


def of_fla(case, peer=None):
    """The inputs, and all entries of one case of flash-linear-attention."""
    saved = entries_of(peer or NAMES[case], case)
    return inputs_of(saved), saved


def of_qwen3_next(case):
    saved = entries_of("gated_delta_qwen3_next", case)
    return inputs_of(saved), saved


def continued_from(m, saved, x):
    """A cache with the initial states of a case, and {name of a state: that of its buffer}."""
    cache = m.init_cache(**x)
    buffers = {name.partition("(")[0].rpartition(".")[2]: name for name in cache.store}
    store = {buffer: saved[f"initial_{name}"] for name, buffer in buffers.items()}
    assert {name: a.shape for name, a in cache.store.items()} == {
        name: a.shape for name, a in store.items()
    }
    return cache._replace(store=store), buffers


def output_of(m, saved, x):
    return m.extend(continued_from(m, saved, x)[0], **x)[0]


def assert_all_agree(saved, result):
    """Agreement within the peers' float32; the measured distance is at most 7e-7."""
    for name, array in result.items():
        assert distance(array, saved[name]) <= 1e-6, name


def assert_call_is_the_peer(m, saved, x):
    out, pullback = m.vjp(**x)
    gradients = pullback(saved["cotangent"])
    assert gradients.keys() == x.keys()
    assert_all_agree(saved, {"out": out} | {f"grad_{name}": a for name, a in gradients.items()})


def assert_is_the_peer(m, saved, x):
    cache, buffers = continued_from(m, saved, x)
    out, cache, pullback = m.extend_vjp(cache, **x)
    d_final = {buffer: saved[f"cotangent_{name}"] for name, buffer in buffers.items()}
    gradients, d_initial = pullback(saved["cotangent"], d_final)
    result = {"out": out} | {f"grad_{name}": gradients[name] for name in x}
    for name, buffer in buffers.items():
        result[f"final_{name}"] = cache.store[buffer]
        result[f"grad_initial_{name}"] = d_initial[buffer]
    assert set(result) == {name for name in saved if name.startswith(("out", "final_", "grad_"))}
    assert_all_agree(saved, result)


def test_delta_product_is_that_of_flash_linear_attention():
    """Its layout has the steps of a token on the time axis."""
    saved = entries_of("delta_product_fla", "delta_product")

    def by_steps(name, array):
        is_step = name.removeprefix("grad_") in ("k", "v", "beta")
        return array.reshape(2, 17, 3, *array.shape[2:]) if is_step else array

    saved = {name: by_steps(name, array) for name, array in saved.items()}
    x = inputs_of(saved)
    assert_is_the_peer(pa.DeltaProduct(steps=3), saved, x)
    x["g"] = np.roll(x["g"], 1, axis=1)
    assert distance(output_of(pa.DeltaProduct(steps=3), saved, x), saved["out"]) > 0.1


@pytest.mark.parametrize("case", FLA)
def test_a_mechanism_with_a_state_is_that_of_flash_linear_attention(case):
    x, saved = of_fla(case)
    assert_is_the_peer(FLA[case], saved, x)


@pytest.mark.parametrize(
    ("text", "peer"), [("retention", "linear_fla"), ("deltaformer", "deltaformer_fla")]
)
def test_a_mechanism_without_a_saved_state_is_that_of_flash_linear_attention(text, peer):
    x, saved = of_fla(text, peer)
    assert_call_is_the_peer(pa.parse(text), saved, x)


def test_mesa_around_ssd_with_weighted_values_is_mesanet_of_flash_linear_attention():
    saved = entries_of("mesa_fla", "mesa")
    beta, v = saved["beta"][..., None], saved["v"]
    x = {name: saved[name] for name in ("q", "k", "g")}
    x |= {"v": beta * v, "beta_mesa": saved["beta"], "lam_mesa": saved["lamb"]}
    out, pullback = pa.Mesa(beta=True).vjp(**x)
    d = pullback(saved["cotangent"])
    result = {"out": out} | {f"grad_{name}": d[name] for name in ("q", "k", "g")}
    result["grad_v"] = beta * d["v"]
    result["grad_beta"] = d["beta_mesa"] + np.sum(v * d["v"], axis=-1)
    result["grad_lamb"] = d["lam_mesa"]
    assert set(result) == {name for name in saved if name.startswith(("out", "grad_"))}
    assert_all_agree(saved, result)


def test_mlstm_is_that_of_xlstm_of_transformers():
    """The calls start from a state, with the cotangent of its maximum, and from zeros."""
    for case in ("continued", "fresh"):
        saved = entries_of("mlstm_xlstm", case)
        x, f = {name: saved[name] for name in ("q", "k", "v", "i")}, saved["f"]
        x["g"] = -np.logaddexp(0, -f)
        saved["grad_g"] = saved["grad_f"] * (1 + np.exp(f))  # df = dg σ(−f).
        del saved["grad_f"]
        if case == "continued":
            assert_is_the_peer(pa.MLSTM(), saved, x)
        else:
            assert_call_is_the_peer(pa.MLSTM(), saved, x)


@pytest.mark.parametrize("case", ["recurrent", "chunk"])
def test_the_gated_delta_rule_after_an_l2_norm_is_that_of_qwen3_next(case):
    x, saved = of_qwen3_next(case)
    assert_is_the_peer(QWEN3_NEXT, saved, x)


MAMBA2_INPUTS = ["x", "dt", "A", "B", "C", "D", "dt_bias"]


def of_mamba2(case):
    """The inputs, the options, and all entries of one case."""
    saved = entries_of("ssd_mamba2", case)
    limits = (float(saved["dt_min"]), float(saved["dt_max"]))
    return (
        {name: saved[name] for name in MAMBA2_INPUTS},
        {"dt_softplus": True, "dt_limit": limits},
        saved,
    )


def test_mamba2_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    x, options, saved = of_mamba2("fresh")
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in x.items()}
    out = pa.mamba2(**leaves, **options)
    out.backward(torch.tensor(saved["cotangent"]))
    result = {f"grad_{name}": leaf.grad.numpy() for name, leaf in leaves.items()}
    assert_all_agree(saved, result | {"out": out.detach().numpy()})
    assert_all_agree(saved, {"out": pa.mamba2(**x, **options)})


def test_mamba2_continued_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    x, options, saved = of_mamba2("continued")
    saved["initial_state"] = torch.tensor(saved["initial_state"], requires_grad=True)
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in x.items()}
    residual = leaves["D"][:, None] * leaves["x"]
    inputs = {name: leaf for name, leaf in leaves.items() if name != "D"}
    inputs = pa.mamba2_inputs(**inputs, **options)
    cache, buffers = continued_from(pa.SSD(), saved, inputs)
    out, cache = pa.SSD().extend(cache, **inputs)
    out, final = out + residual, cache.store[buffers["state"]]
    torch.autograd.backward(
        [out, final], [torch.tensor(saved[name]) for name in ("cotangent", "cotangent_state")]
    )
    result = {f"grad_{name}": leaf.grad.numpy() for name, leaf in leaves.items()}
    result["grad_initial_state"] = saved["initial_state"].grad.numpy()
    result |= {"out": out.detach().numpy(), "final_state": final.detach().numpy()}
    assert_all_agree(saved, result)
