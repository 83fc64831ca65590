"""Layers with the weights of public ones give their outputs and gradients (`peers/`).

Each mapping below says where a public weight goes, with the axes that recipes declare. It only
moves numbers, so that it maps gradients as it maps weights.
"""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.recipes import MESANET, Biased, Projection, UnitConvolution
from precondattn.layers.recipes.hgrn2 import BoundedLogSigmoid
from precondattn.layers.recipes.rwkv6 import DecayMixedByToken, MixedByToken
from precondattn.layers.torch import Attention
from tests.layers.torch_layers import from_declared_axes

PEERS = Path(__file__).parent / "peers"


def heads(weight, n):
    """A public matrix (n · d, x) as ours, (x, n, d)."""
    return weight.T.reshape(weight.shape[1], n, -1)


def from_heads(weight, n):
    """A public matrix (x, n · e) of the last projection as ours, (n, e, x)."""
    return weight.T.reshape(n, -1, weight.shape[0])


def llama(w):
    return {
        "q.weight": heads(w["q_proj.weight"], 4),
        "k.weight": heads(w["k_proj.weight"], 2),
        "v.weight": heads(w["v_proj.weight"], 2),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def diffllama(w):
    """Heads of a pair are half of all heads apart; the values of a pair are side by side."""
    q, q2 = np.split(heads(w["q_proj.weight"], 4), 2, 1)
    k, k2 = np.split(heads(w["k_proj.weight"], 2), 2, 1)
    v = np.concatenate(np.split(heads(w["v_proj.weight"], 2), 2, 1), 2)
    vectors = {f"lam.{n}": w[f"lambda_{n}"] for n in ("q1", "k1", "q2", "k2")}
    rows = {"q.weight": q, "q2.weight": q2, "k.weight": k, "k2.weight": k2, "v.weight": v}
    return {**rows, **vectors, "out.projection": from_heads(w["o_proj.weight"], 2)}


def qwen3_next(w):
    """One matrix for q, k, v and the gate, interleaved by key heads, and one for β and the gate."""
    qkvz = heads(w["in_proj_qkvz.weight"], 2)
    q, k, v, gate = np.split(qkvz, np.cumsum([8, 8, 12]), 2)
    beta, step = np.split(heads(w["in_proj_ba.weight"], 2), 2, 2)
    parts = np.split(w["conv1d.weight"][:, 0].T, np.cumsum([16, 16]), 1)
    convolutions = (part.reshape(4, n, -1) for part, n in zip(parts, (2, 2, 4), strict=True))
    return {
        "q.weight": q,
        "k.weight": k,
        "v.weight": v.reshape(32, 4, 6),
        **dict(zip(("q.convolution", "k.convolution", "v.convolution"), convolutions, strict=True)),
        "beta.weight": beta.reshape(32, 4),
        "g.weight": step.reshape(32, 4),
        "g.A_log": w["A_log"],
        "g.dt_bias": w["dt_bias"],
        "out.gate": gate.reshape(32, 4, 6),
        "out.gain": w["norm.weight"],
        "out.projection": from_heads(w["out_proj.weight"], 4),
    }


def mamba2(w):
    """One matrix for the gate, x, B, C and Δ, and one convolution of x, B and C."""
    gate, x, b, c, step = np.split(w["in_proj.weight"], np.cumsum([32, 32, 12, 12]))
    of_x, of_b, of_c = np.split(w["conv1d.weight"][:, 0].T, np.cumsum([32, 12]), 1)
    bias_x, bias_b, bias_c = np.split(w["conv1d.bias"], np.cumsum([32, 12]))
    rows = {}
    for name, n, weight, convolution, bias in (
        ("q", 2, c, of_c, bias_c),
        ("k", 2, b, of_b, bias_b),
        ("x", 4, x, of_x, bias_x),
    ):
        rows[f"{name}.weight"] = heads(weight, n)
        rows[f"{name}.convolution"] = convolution.reshape(4, n, -1)
        rows[f"{name}.bias"] = bias.reshape(n, -1)
    return {
        **rows,
        "dt.weight": step.T,
        "dt.dt_bias": w["dt_bias"],
        "g.A_log": w["A_log"],
        "out.gate": heads(gate, 4),
        "out.D": w["D"],
        "out.gain": w["norm.weight"].reshape(4, 8),
        "out.projection": from_heads(w["out_proj.weight"], 4),
    }


def xlstm(w):
    gates = {"g": "fgate_preact", "i": "igate_preact"}
    return {
        **{f"{name}.weight": heads(w[f"{name}.weight"], 4) for name in "qkv"},
        **{f"{name}.weight": w[f"{gate}.weight"].T for name, gate in gates.items()},
        **{f"{name}.bias": w[f"{gate}.bias"] for name, gate in gates.items()},
        "out.gain": w["multihead_norm.weight"].reshape(4, -1),
        "out.gate": heads(w["ogate_preact.weight"], 4),
        "out.projection": from_heads(w["out_proj.weight"], 4),
    }


def convolved(w, names, n=4):
    """The three projections of a layer with short convolutions, (n · d, 1, 4) each."""
    return {
        **{f"{name}.weight": heads(w[f"{name}_proj.weight"], n) for name in names},
        **{
            f"{name}.convolution": w[f"{name}_conv1d.weight"][:, 0].T.reshape(4, n, -1)
            for name in names
        },
    }


def gla(w):
    return {
        "q.weight": heads(w["q_proj.weight"], 4),
        "k.weight": heads(w["k_proj.weight"], 2),
        "v.weight": heads(w["v_proj.weight"], 2),
        "g.down": w["gk_proj.0.weight"].T,
        "g.up": heads(w["gk_proj.1.weight"], 2),
        "g.bias": w["gk_proj.1.bias"].reshape(2, -1),
        "out.gain": w["g_norm_swish_gate.weight"],
        "out.gate": heads(w["g_proj.weight"], 4),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def delta_net(w):
    return {
        **convolved(w, "qkv"),
        "beta.weight": w["b_proj.weight"].T,
        "out.gain": w["o_norm.weight"],
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def gated_delta_net(w):
    return {
        **delta_net(w),
        "g.weight": w["a_proj.weight"].T,
        "g.A_log": w["A_log"],
        "g.dt_bias": w["dt_bias"],
        "out.gate": heads(w["g_proj.weight"], 4),
    }


def mesa_net(w):
    return {
        **convolved(w, "qk"),
        "v.weight": heads(w["v_proj.weight"], 4),
        "g.weight": w["a_proj.weight"].T,
        "g.bias": w["a_proj.bias"],
        "beta_mesa.weight": w["b_proj.weight"].T,
        "beta_mesa.bias": w["b_proj.bias"],
        "lam_mesa.weight": w["lambda_params"].reshape(4, -1),
        "out.gain": w["o_norm.weight"],
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def kda(w):
    return {
        **delta_net(w),
        "g.down": w["f_proj.0.weight"].T,
        "g.up": heads(w["f_proj.1.weight"], 4),
        "g.A_log": w["A_log"],
        "g.dt_bias": w["dt_bias"].reshape(4, -1),
        "out.down": w["g_proj.0.weight"].T,
        "out.up": heads(w["g_proj.1.weight"], 4),
        "out.bias": w["g_proj.1.bias"].reshape(4, -1),
    }


def gdn2(w):
    return {
        **{name: array for name, array in kda(w).items() if name != "beta.weight"},
        "b.weight": heads(w["b_proj.weight"], 4),
        "w.weight": heads(w["w_proj.weight"], 4),
    }


def comba(w):
    gated = gated_delta_net(w)
    raw = {name.replace("k.", "raw."): gated.pop(name) for name in list(gated) if name[:2] == "k."}
    return {**gated, **raw, "shortened.decay": w["decay"], "q.D": w["D"]}


def precond_gated_delta_net(w):
    return {
        **gated_delta_net(w),
        "g_atk.weight": w["a_atk_proj.weight"].T,
        "g_atk.A_log": w["A_log_atk"],
        "g_atk.dt_bias": w["dt_bias_atk"],
        "beta_atk.weight": w["b_atk_proj.weight"].T,
        "log_atk_scale.weight": w["log_atk_scale"],
    }


def gated_delta_product(w):
    """Two steps of four heads each."""
    steps = {f"{name}.weight": w[f"{name}_proj.weight"].T.reshape(32, 2, 4, -1) for name in "kv"}
    convolutions = {
        f"{name}.convolution": w[f"{name}_conv1d.weight"][:, 0].T.reshape(4, 2, 4, -1)
        for name in "kv"
    }
    beta = {"beta.weight": w["b_proj.weight"].T.reshape(32, 2, 4)}
    return {**gated_delta_net(w), **steps, **convolutions, **beta}


def hgrn2(w):
    return {
        "q.weight": heads(w["q_proj.weight"], 4),
        "v.weight": heads(w["i_proj.weight"], 4),
        "g.weight": heads(w["f_proj.weight"], 4),
        "out.gain": w["g_norm.weight"].reshape(4, -1),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def rwkv6(w):
    rows = {"q": "r", "g": "w", "k": "k", "v": "v", "gate": "g"}
    mixes = {}
    for (own, name), mix in zip(rows.items(), w["x_bias"], strict=True):
        mixes |= {
            f"{own}.first_mix": w[f"x_proj.0.{name}.mu"],
            f"{own}.mix_down": w[f"x_proj.0.{name}.linear.weight"].T,
            f"{own}.mix_up": w[f"x_proj.2.{name}.weight"].T,
            f"{own}.mix": mix,
        }
    return {
        **mixes,
        **{
            f"{own}.weight": heads(w[f"{name}_proj.weight"], 4)
            for own, name in rows.items()
            if own != "g"
        },
        "g.down": w["w_proj.lora.0.weight"].T,
        "g.up": heads(w["w_proj.lora.2.weight"], 4),
        "g.bias": w["w_proj.lora.2.bias"].reshape(4, -1),
        "u.weight": w["bonus"],
        "out.gain": w["g_norm.weight"].reshape(4, -1),
        "out.bias": w["g_norm.bias"].reshape(4, -1),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def rwkv7(w):
    def lora(name, to):
        parts = {
            f"{to}.down": w[f"{name}_lora.0.weight"].T,
            f"{to}.up": heads(w[f"{name}_lora.2.weight"], 4),
            f"{to}.mix": w[f"x_{name}"],
        }
        bias = w.get(f"{name}_lora.2.bias")
        return parts if bias is None else {**parts, f"{to}.bias": bias.reshape(4, -1)}

    rows = {"q": "r", "raw": "k", "v": "v"}
    return {
        **{f"{own}.weight": heads(w[f"{name}_proj.weight"], 4) for own, name in rows.items()},
        **{f"{own}.mix": w[f"x_{name}"] for own, name in rows.items()},
        **lora("w", "g"),
        **lora("a", "rate"),
        **lora("g", "gate"),
        "kappa.gain": w["k_k"].reshape(4, -1),
        "k.alpha": w["k_a"].reshape(4, -1),
        "out.bonus": w["r_k"],
        "out.gain": w["g_norm.weight"].reshape(4, -1),
        "out.bias": w["g_norm.bias"].reshape(4, -1),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def gsa(w):
    return {
        "q.weight": heads(w["q_proj.weight"], 4),
        "k.weight": heads(w["k_proj.weight"], 2),
        "v.weight": heads(w["v_proj.weight"], 2),
        "g.weight": heads(w["f_proj.weight"], 2),
        "out.gain": w["g_norm.weight"].reshape(4, -1),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def retention(w):
    return {
        **{f"{name}.weight": heads(w[f"{name}_proj.weight"], 4) for name in "qkv"},
        "out.gain": w["g_norm_swish_gate.weight"],
        "out.gate": heads(w["g_proj.weight"], 4),
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


def path(w):
    return {
        **{f"{name}.weight": heads(w[f"{name}_proj.weight"], 4) for name in "qkv"},
        "w.down": w["w_proj.0.weight"].T,
        "w.up": heads(w["w_proj.1.weight"], 4),
        "w.convolution": w["w_conv1d.weight"][:, 0].T.reshape(3, 4, -1),
        "beta.weight": w["bt_proj.weight"].T,
        "beta.bias": w["bt_proj.bias"],
        "g.weight": w["g_proj.weight"].T,
        "g.bias": w["g_proj.bias"],
        "out.projection": from_heads(w["o_proj.weight"], 4),
    }


FOUR = {"width": 32, "heads": 4}


def of_rows(name, weight, bias, n=4):
    """A public matrix and its bias as those of q, k or v."""
    return {f"{name}.weight": heads(weight, n), f"{name}.bias": bias.reshape(n, -1)}


def xca(w):
    """Its factor is γ; q, k and v are one matrix."""
    rows = zip("qkv", np.split(w["qkv.weight"], 3), np.split(w["qkv.bias"], 3), strict=True)
    return {
        **{name: array for each in rows for name, array in of_rows(*each).items()},
        "logit_scale.weight": w["temperature"][:, 0, 0],
        "out.projection": from_heads(w["proj.weight"], 4),
        "out.projection_bias": w["proj.bias"],
    }


def nystromformer(w):
    """Its convolution is our skip."""
    rows = {"q": "query", "k": "key", "v": "value"}
    return {
        **{
            own: array
            for name, public in rows.items()
            for own, array in of_rows(
                name, w[f"self.{public}.weight"], w[f"self.{public}.bias"]
            ).items()
        },
        "skip.weight": w["self.conv.weight"][:, 0, :, 0],
        "out.projection": from_heads(w["dense.weight"], 4),
        "out.projection_bias": w["dense.bias"],
    }


BIASED = {**dict.fromkeys("qkv", Projection(bias=True)), "out": Biased()}
"""Recipes of vision transformers, whose linear maps have biases."""

LAYERS = {
    gla: {**FOUR, "kv_heads": 2, "mechanism": "gla"},
    delta_net: {**FOUR, "mechanism": "delta"},
    gated_delta_net: {**FOUR, "value_dim": 16, "mechanism": "gated_delta"},
    kda: {**FOUR, "value_dim": 16, "mechanism": "kda"},
    gdn2: {**FOUR, "value_dim": 16, "mechanism": "gdn2"},
    comba: {**FOUR, "value_dim": 16, "mechanism": "comba"},
    precond_gated_delta_net: {
        **FOUR,
        "value_dim": 16,
        "mechanism": "atk[learned=true]",
        "recipes": {"q": UnitConvolution(eps=0.0), "k": UnitConvolution(eps=0.0)},
    },
    gated_delta_product: {**FOUR, "value_dim": 16, "mechanism": "delta_product"},
    hgrn2: {**FOUR, "mechanism": "hgrn2", "recipes": {"g": BoundedLogSigmoid(low=0.25)}},
    rwkv6: {
        **FOUR,
        "mechanism": "rwkv6[scale=1]",
        "recipes": {
            **dict.fromkeys(("gate", "q", "k", "v"), MixedByToken(rank=6)),
            "g": DecayMixedByToken(rank=6, decay_rank=7),
        },
    },
    rwkv7: {**FOUR, "mechanism": "dplr[scale=1]"},
    mesa_net: {**FOUR, "mechanism": "mesa[beta=true](ssd)", "recipes": MESANET},
    gsa: {**FOUR, "kv_heads": 2, "slots": 3, "mechanism": "gsa[scale=1]"},
    retention: {**FOUR, "value_dim": 16, "mechanism": "retention"},
    path: {**FOUR, "mechanism": "path[forget=scaled]"},
    llama: {"width": 32, "heads": 4, "kv_heads": 2, "mechanism": "softmax"},
    diffllama: {"width": 32, "heads": 2, "kv_heads": 1, "mechanism": "differential", "depth": 1},
    qwen3_next: {
        "width": 32,
        "heads": 2,
        "value_heads": 4,
        "head_dim": 8,
        "value_dim": 6,
        "mechanism": "gated_delta",
    },
    xlstm: {"width": 32, "heads": 4, "head_dim": 4, "value_dim": 8, "mechanism": "mlstm"},
    xca: {
        "width": 32,
        "heads": 4,
        "mechanism": "cross_covariance[eps=1e-24]",
        "recipes": BIASED,
    },
    nystromformer: {
        "width": 32,
        "heads": 4,
        "slots": 5,
        "mechanism": "nystrom[landmarks=3,start=batch,skip=true]",
        "recipes": BIASED,
    },
    mamba2: {
        "width": 16,
        "heads": 2,
        "value_heads": 4,
        "head_dim": 6,
        "value_dim": 8,
        "mechanism": "ssd",
    },
}


CANCEL = ((nystromformer, "k_proj.bias"), (xlstm, "i_proj.bias"))
"""One bias of all keys, or of all input gates, moves the weights of a query alike: its gradient is
what rounding leaves of 0, but where a sum of weights is less than 1."""


@pytest.mark.parametrize("mapping", LAYERS, ids=lambda mapping: mapping.__name__)
def test_a_layer_with_public_weights_gives_the_public_output_and_gradients(mapping):
    sizes = dict(LAYERS[mapping])
    attn = Attention(sizes.pop("width"), **sizes)
    with np.load(PEERS / f"{mapping.__name__}.npz") as entries:
        given = dict(entries)
    weights, gradients = (
        mapping({n.removeprefix(prefix): a for n, a in given.items() if n.startswith(prefix)})
        for prefix in ("weight.", "grad.")
    )
    missing = attn.load_state_dict(from_declared_axes(attn, weights), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"inputs.out.gain"}  # DiffLlama has none.
    x = torch.tensor(given["x"], requires_grad=True)
    y = attn(x)
    (y * torch.tensor(given["cotangent"])).sum().backward()
    assert_close(y.detach(), given["out"], "out")
    assert_close(x.grad, given["grad_x"], "x")
    expected = from_declared_axes(attn, gradients)
    for name, gradient in expected.items():
        terms = expected[name.replace("bias", "weight")] if (mapping, name) in CANCEL else gradient
        assert_close(attn.get_parameter(name).grad, gradient.numpy(), name, terms.numpy())


def assert_close(found, expected, name, terms=None):
    """Within 1e-5 of the largest entry, of `terms` if the result is a sum of them."""
    error = np.abs(found.numpy() - expected).max()
    largest = np.abs(expected if terms is None else terms).max()
    assert error <= 1e-5 * largest, (name, error, largest)
