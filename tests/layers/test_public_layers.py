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
from precondattn.layers.recipes.gates import BoundedLogSigmoid
from precondattn.layers.recipes.rwkv6 import DecayMixedByToken, MixedByToken
from precondattn.layers.torch import Attention
from tests.layers.torch_layers import from_declared_axes

RESULTS = Path(__file__).parent / "peers" / "results.npz"


def saved_entries(name):
    """The entries of a public layer, as `peers/make_fixtures.py` saved them."""
    with np.load(RESULTS) as entries:
        chosen = [entry for entry in entries if entry.startswith(f"{name}/")]
        return {entry.removeprefix(f"{name}/"): entries[entry] for entry in chosen}


def heads(weight, n=4):
    """A public matrix (n · d, x), or its bias, as ours, (x, n, d) or (n, d)."""
    return weight.T.reshape(*weight.shape[1:], n, -1)


def rows(w, pattern="{}_proj.weight", /, **counts):
    """The weights of q, k, v …, with so many heads."""
    return {f"{name}.weight": heads(w[pattern.format(name)], n) for name, n in counts.items()}


def output(w, n=4, name="o_proj"):
    """A public matrix (x, n · e) of the last projection as ours, (n, e, x)."""
    weight = w[f"{name}.weight"]
    return {"out.projection": weight.T.reshape(n, -1, weight.shape[0])}


def convolution(weight, *shape):
    """The weight (n · d, 1, size) of a short convolution as ours, (size, n, d)."""
    return weight[:, 0].T.reshape(weight.shape[-1], *shape, -1)


def convolved(w, names, *shape):
    """Projections with short convolutions."""
    shape = shape or (4,)
    weights = {f"{n}.weight": w[f"{n}_proj.weight"].T.reshape(32, *shape, -1) for n in names}
    kernels = {f"{n}.convolution": convolution(w[f"{n}_conv1d.weight"], *shape) for n in names}
    return weights | kernels


def linear(w, name, public, bias=False):
    """A map to a number for each head."""
    found = {f"{name}.weight": w[f"{public}.weight"].T}
    return {**found, f"{name}.bias": w[f"{public}.bias"]} if bias else found


def low_rank(w, name, public, n=4, bias=False, last=1):
    """A map through a low rank."""
    down, up = (w[f"{public}.{i}.weight"] for i in (0, last))
    found = {f"{name}.down": down.T, f"{name}.up": heads(up, n)}
    return {**found, f"{name}.bias": heads(w[f"{public}.{last}.bias"], n)} if bias else found


def llama(w):
    return {**rows(w, q=4, k=2, v=2), **output(w)}


def diffllama(w):
    """Heads of a pair are half of all heads apart; the values of a pair are side by side."""
    q, q2 = np.split(heads(w["q_proj.weight"], 4), 2, 1)
    k, k2 = np.split(heads(w["k_proj.weight"], 2), 2, 1)
    v = np.concatenate(np.split(heads(w["v_proj.weight"], 2), 2, 1), 2)
    vectors = {f"lam.{n}": w[f"lambda_{n}"] for n in ("q1", "k1", "q2", "k2")}
    own = {"q.weight": q, "q2.weight": q2, "k.weight": k, "k2.weight": k2, "v.weight": v}
    return {**own, **vectors, **output(w, 2)}


def qwen3_next(w):
    """One matrix for q, k, v and the gate, interleaved by key heads, and one for β and the gate."""
    qkvz = heads(w["in_proj_qkvz.weight"], 2)
    q, k, v, gate = np.split(qkvz, np.cumsum([8, 8, 12]), 2)
    beta, step = np.split(heads(w["in_proj_ba.weight"], 2), 2, 2)
    parts = np.split(w["conv1d.weight"], np.cumsum([16, 16]))
    kernels = {
        f"{name}.convolution": convolution(part, n)
        for name, part, n in zip("qkv", parts, (2, 2, 4), strict=True)
    }
    return {
        "q.weight": q,
        "k.weight": k,
        "v.weight": v.reshape(32, 4, 6),
        **kernels,
        "beta.weight": beta.reshape(32, 4),
        "g.weight": step.reshape(32, 4),
        "g.A_log": w["A_log"],
        "g.dt_bias": w["dt_bias"],
        "out.gate": gate.reshape(32, 4, 6),
        "out.gain": w["norm.weight"],
        **output(w, name="out_proj"),
    }


def mamba2(w):
    """One matrix for the gate, x, B, C and Δ, and one convolution of x, B and C."""
    gate, x, b, c, step = np.split(w["in_proj.weight"], np.cumsum([32, 32, 12, 12]))
    kernels = np.split(w["conv1d.weight"], np.cumsum([32, 12]))
    biases = np.split(w["conv1d.bias"], np.cumsum([32, 12]))
    own = {}
    parts = zip("xkq", (4, 2, 2), (x, b, c), kernels, biases, strict=True)
    for name, n, weight, kernel, bias in parts:
        own[f"{name}.weight"] = heads(weight, n)
        own[f"{name}.convolution"] = convolution(kernel, n)
        own[f"{name}.bias"] = bias.reshape(n, -1)
    return {
        **own,
        "dt.weight": step.T,
        "dt.dt_bias": w["dt_bias"],
        "g.A_log": w["A_log"],
        "out.gate": heads(gate),
        "out.D": w["D"],
        "out.gain": heads(w["norm.weight"]),
        **output(w, name="out_proj"),
    }


def xlstm(w):
    return {
        **rows(w, "{}.weight", q=4, k=4, v=4),
        **linear(w, "g", "fgate_preact", bias=True),
        **linear(w, "i", "igate_preact", bias=True),
        "out.gain": heads(w["multihead_norm.weight"]),
        "out.gate": heads(w["ogate_preact.weight"]),
        **output(w, name="out_proj"),
    }


def gla(w):
    return {
        **llama(w),
        **low_rank(w, "g", "gk_proj", 2, bias=True),
        "out.gain": w["g_norm_swish_gate.weight"],
        "out.gate": heads(w["g_proj.weight"]),
    }


def delta_net(w, shape_of_steps=()):
    return {
        **convolved(w, "q"),
        **convolved(w, "kv", *shape_of_steps),
        **linear(w, "beta", "b_proj"),
        "out.gain": w["o_norm.weight"],
        **output(w),
    }


def decay(w, name="g", public="a_proj", suffix=""):
    rates = {f"{name}.{n}": w[f"{n}{suffix}"] for n in ("A_log", "dt_bias")}
    return linear(w, name, public) | rates


def gated_delta_net(w, *shape_of_steps):
    return {
        **delta_net(w, shape_of_steps),
        **decay(w),
        "out.gate": heads(w["g_proj.weight"]),
    }


def gated_delta_product(w):
    """Two steps of four heads each."""
    found = gated_delta_net(w, 2, 4)
    return {**found, "beta.weight": found["beta.weight"].reshape(32, 2, 4)}


def mesa_net(w):
    return {
        **convolved(w, "qk"),
        **rows(w, v=4),
        **linear(w, "g", "a_proj", bias=True),
        **linear(w, "beta_mesa", "b_proj", bias=True),
        "lam_mesa.weight": heads(w["lambda_params"]),
        "out.gain": w["o_norm.weight"],
        **output(w),
    }


def kda(w):
    return {
        **delta_net(w),
        **low_rank(w, "g", "f_proj"),
        "g.A_log": w["A_log"],
        "g.dt_bias": heads(w["dt_bias"]),
        **low_rank(w, "out", "g_proj", bias=True),
    }


def gdn2(w):
    own = {name: array for name, array in kda(w).items() if name != "beta.weight"}
    return {**own, **rows(w, b=4, w=4)}


def comba(w):
    gated = gated_delta_net(w)
    raw = {name.replace("k.", "raw."): gated.pop(name) for name in list(gated) if name[:2] == "k."}
    return {**gated, **raw, "shortened.decay": w["decay"], "q.D": w["D"]}


def precond_gated_delta_net(w):
    return {
        **gated_delta_net(w),
        **decay(w, "g_atk", "a_atk_proj", "_atk"),
        **linear(w, "beta_atk", "b_atk_proj"),
        "log_atk_scale.weight": w["log_atk_scale"],
    }


def hgrn2(w):
    return {
        **rows(w, q=4),
        "v.weight": heads(w["i_proj.weight"]),
        "g.weight": heads(w["f_proj.weight"]),
        "out.gain": heads(w["g_norm.weight"]),
        **output(w),
    }


def normed(w):
    return {f"out.{own}": heads(w[f"g_norm.{n}"]) for own, n in (("gain", "weight"), ("bias",) * 2)}


def rwkv6(w):
    public = {"q": "r", "g": "w", "k": "k", "v": "v", "gate": "g"}
    own = {}
    for (name, theirs), mix in zip(public.items(), w["x_bias"], strict=True):
        own |= {
            f"{name}.first_mix": w[f"x_proj.0.{theirs}.mu"],
            f"{name}.mix_down": w[f"x_proj.0.{theirs}.linear.weight"].T,
            f"{name}.mix_up": w[f"x_proj.2.{theirs}.weight"].T,
            f"{name}.mix": mix,
        }
        if name != "g":
            own[f"{name}.weight"] = heads(w[f"{theirs}_proj.weight"])
    gate = low_rank(w, "g", "w_proj.lora", bias=True, last=2)
    return {**own, **gate, "u.weight": w["bonus"], **normed(w), **output(w)}


def rwkv7(w):
    own = {}
    for name, theirs in {"q": "r", "raw": "k", "v": "v"}.items():
        own[f"{name}.weight"] = heads(w[f"{theirs}_proj.weight"])
        own[f"{name}.mix"] = w[f"x_{theirs}"]
    for name, theirs in {"g": "w", "rate": "a", "gate": "g"}.items():
        own |= low_rank(w, name, f"{theirs}_lora", bias=theirs != "g", last=2)
        own[f"{name}.mix"] = w[f"x_{theirs}"]
    return {
        **own,
        "kappa.gain": heads(w["k_k"]),
        "k.alpha": heads(w["k_a"]),
        "out.bonus": w["r_k"],
        **normed(w),
        **output(w),
    }


def gsa(w):
    return {
        **llama(w),
        "g.weight": heads(w["f_proj.weight"], 2),
        "out.gain": heads(w["g_norm.weight"]),
    }


def retention(w):
    return {
        **rows(w, q=4, k=4, v=4),
        "out.gain": w["g_norm_swish_gate.weight"],
        "out.gate": heads(w["g_proj.weight"]),
        **output(w),
    }


def path(w):
    return {
        **rows(w, q=4, k=4, v=4),
        **low_rank(w, "w", "w_proj"),
        "w.convolution": convolution(w["w_conv1d.weight"], 4),
        **linear(w, "beta", "bt_proj", bias=True),
        **linear(w, "g", "g_proj", bias=True),
        **output(w),
    }


def nystromformer(w):
    """Its convolution is our skip."""
    own = {"skip.weight": w["self.conv.weight"][:, 0, :, 0]}
    for name in ("query", "key", "value"):
        for kind in ("weight", "bias"):
            own[f"{name[0]}.{kind}"] = heads(w[f"self.{name}.{kind}"])
    return {**own, **output(w, name="dense"), "out.projection_bias": w["dense.bias"]}


BIASED = {**dict.fromkeys("qkv", Projection(bias=True)), "out": Biased()}
"""Recipes of vision transformers, whose linear maps have biases."""

WIDE = {"value_dim": 16}
LAYERS = {
    gla: ("gla", {"kv_heads": 2}),
    delta_net: ("delta", {}),
    gated_delta_net: ("gated_delta", WIDE),
    kda: ("kda", WIDE),
    gdn2: ("gdn2", WIDE),
    comba: ("comba", WIDE),
    precond_gated_delta_net: (
        "atk[learned=true]",
        {**WIDE, "recipes": dict.fromkeys("qk", UnitConvolution(eps=0.0))},
    ),
    gated_delta_product: ("delta_product", WIDE),
    hgrn2: ("hgrn2", {"recipes": {"g": BoundedLogSigmoid(low=0.25)}}),
    rwkv6: (
        "rwkv6[scale=1]",
        {
            "recipes": {
                **dict.fromkeys(("gate", "q", "k", "v"), MixedByToken(rank=6)),
                "g": DecayMixedByToken(rank=6, decay_rank=7),
            }
        },
    ),
    rwkv7: ("dplr[scale=1]", {}),
    mesa_net: ("mesa[beta=true](ssd)", {"recipes": MESANET}),
    gsa: ("gsa[scale=1]", {"kv_heads": 2, "slots": 3}),
    retention: ("retention", WIDE),
    path: ("path[forget=scaled]", {}),
    llama: ("softmax", {"kv_heads": 2}),
    diffllama: ("differential", {"heads": 2, "kv_heads": 1, "depth": 1}),
    qwen3_next: (
        "gated_delta",
        {"heads": 2, "value_heads": 4, "head_dim": 8, "value_dim": 6},
    ),
    xlstm: ("mlstm", {"head_dim": 4, "value_dim": 8}),
    nystromformer: (
        "nystrom[landmarks=3,start=batch,skip=true]",
        {"slots": 5, "recipes": BIASED},
    ),
    mamba2: (
        "ssd",
        {"width": 16, "heads": 2, "value_heads": 4, "head_dim": 6, "value_dim": 8},
    ),
}
"""The mechanism of each layer, and its sizes where they are not a width of 32 and 4 heads."""

CANCEL = ((nystromformer, "k_proj.bias"), (xlstm, "i_proj.bias"))
"""One bias of all keys, or of all input gates, moves the weights of a query alike: its gradient is
what rounding leaves of 0, but where a sum of weights is less than 1."""


@pytest.mark.parametrize("mapping", LAYERS, ids=lambda mapping: mapping.__name__)
def test_a_layer_with_public_weights_gives_the_public_output_and_gradients(mapping):
    mechanism, options = LAYERS[mapping]
    sizes = {"width": 32, "heads": 4, **options}
    attn = Attention(sizes.pop("width"), mechanism=mechanism, **sizes)
    given = saved_entries(mapping.__name__)
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
