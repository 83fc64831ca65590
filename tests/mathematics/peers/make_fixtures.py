"""Save results of public implementations, so that tests compare with them without installing them.

`path_fla.npz`: flash-linear-attention's naive PaTH attention and its gradients, for three cases
(the prefix of the entries): `gqa`, four chunks and two query heads for each key head; `odd`, a
length that the chunk does not divide; `gate`, with a forget gate. float32, because the peer always
computes in float32.

    q, out, cotangent       (batch, time, query heads, dim)
    k, v, w                 (batch, time, heads, dim), w of unit norm
    beta                    (batch, time, heads), in (0, 2)
    g                       (batch, time, query heads), log of the gate; 0 but in `gate`
    scale, chunk_size       scalars
    grad_q … grad_g         gradients of sum(out * cotangent), of the shapes of the inputs

`differential_diffllama.npz`: the differential attention of Transformers' DiffLlama, under a causal
mask, without rotation. float64, but the peer computes its softmax and exp(λ) in float32.

    q                       (batch, time, heads=8, dim=8), the output of q_proj; unscaled
    k, v                    (batch, time, key/value heads=4, dim=8), likewise
    scale                   scalar, of the logits
    lam, lambda_init        scalars: λ = exp(λq1·λk1) − exp(λq2·λk2) + lambda_init, its last term
    difference              (batch, time, pairs of heads=4, 2 dim=16), the input of its group norm
    before_o_proj           (batch, time, 64), the input of o_proj: (1 − lambda_init) times the
                            group norm of `difference`, the pairs side by side

Mechanisms with a state are in these files, by cases (the prefix of the entries), all in float32:

`linear_fla.npz`: flash-linear-attention's naive references of linear attention (`linear`, and
`normalized`, with a denominator), of `retention`, of `gla`, and of `simple` GLA.
`rwkv6_fla.npz`: that of RWKV-6, `rwkv6`, without a scale.
`hgrn2_fla.npz`: that of gated linear attention, with the keys of HGRN2's gates, `hgrn2`.
`delta_fla.npz`: those of `delta`, the delta rule, and of the gated one, token by token
(`recurrent`) and in chunks of 16 (`chunk`).
`kda_fla.npz`: those of Kimi Delta Attention, with two value heads for each key head, token by token
(`kda`) and in chunks of 16 (`kda_chunk`).
`gdn2_fla.npz`: that of Gated DeltaNet 2, `gdn2`. b in [0, 2], w in [0, 1].
`comba_fla.npz`: those of Comba, token by token (`comba`, which reads p in the decayed state) and in
chunks of 16 (`comba_chunk`, which reads it before, as its kernels do). beta in [0, 1].
`dplr_fla.npz`: that of DPLR, `dplr`, with a and b of length 1 as the peer's alpha and beta.
`delta_product_fla.npz`: that of the gated DeltaProduct, `delta_product`, with three steps a token,
in the peer's layout: k, v and beta (batch, 3 time, heads, …).
`atk_fla.npz`: those of the preconditioned delta rules, with two value heads for each key head in
`pgdn`, which normalises q and k itself, and with learnt centres in `pkda`. beta in [0, 1].
`gsa_fla.npz`: that of gated slot attention, `gsa`, with two query heads for each key head.
`mesa_fla.npz`: that of MesaNet with exact solves, `mesa`, without states. beta in [0, 1], lamb > 0.
`mlstm_xlstm.npz`: the mLSTM of Transformers' xLSTM token by token, with the pre-activations f and i
of its gates, from a state (`continued`), and from nothing (`fresh`: a maximum of −∞), where q and k
are positive and some input gates are 6.
`deltaformer_fla.npz`: that of DeltaFormer, `deltaformer`, which has no state. beta in [0, 1].
`gated_delta_qwen3_next.npz`: the gated delta rule of Transformers' Qwen3-Next, `recurrent` and
`chunk`, with its L2 norm of queries and keys and two value heads for each key head.
`linear_attention_onnx.npz`: the reference of ONNX's operator LinearAttention, without gradients,
for `linear`, `retention`, `gla`, `delta`, `gated_delta` and `kda`, with two query heads for each
key head in `linear` and `gla`.
`ssd_mamba2.npz`: the chunked scan of Transformers' Mamba-2, with two groups of two heads, from
nothing (`fresh`) and from a state (`continued`).

    q, k, v, g, u, beta, b, w, p, s, a, g_atk, beta_atk, log_atk_scale
                            (batch, time, heads, …), those that the peer takes. g: log of the
                            gate, for each head, channel (gla) or slot (gsa); some are 0 or −8.
                            u (heads, key width)
                            beta in [0, 2]; some are 0 or 2
    x, dt, A, B, C, D, dt_bias, dt_min, dt_max
                            of Mamba-2 instead; dt is before its bias, softplus and limits
    out, cotangent          (batch, time, heads, value width)
    initial_*, final_*      states by name: `state` (batch, heads, key width, value width), the
                            `mass` (batch, heads, key width) of `normalized`, both and the
                            `maximum` (batch, heads) of `continued`, and `keys` and
                            `values` of `gsa`, (batch, heads, key width, slots) and (batch, heads,
                            slots, value width); none of `retention` and `fresh`
    cotangent_*             of the final states, by the same names
    grad_*                  gradients of sum(out * cotangent) + Σ sum(final_* * cotangent_*), with
                            respect to the inputs and the initial states (grad_initial_*)

All have `versions`, a string. To run it, in an environment of its own:

    python -m pip install -e '.[peers]' && python tests/mathematics/peers/make_fixtures.py
"""

import importlib.metadata
import inspect
from pathlib import Path

import numpy as np

from precondattn_conformance.peers.fla import references

# torch and transformers are imported where they are used: pytest imports this file to collect it.

HERE = Path(__file__).resolve().parent
MAX_BYTES = 200_000
PATH_CASES = {
    "gqa": {"batch": 1, "time": 64, "query_heads": 4, "heads": 2, "chunk_size": 16, "gate": False},
    "odd": {"batch": 2, "time": 33, "query_heads": 2, "heads": 1, "chunk_size": 16, "gate": False},
    "gate": {"batch": 2, "time": 24, "query_heads": 4, "heads": 2, "chunk_size": 8, "gate": True},
}


def clustered(rng, shape, clusters=4, spread=0.4):
    """Return normal vectors (batch, time, ...) around a few centres, which the times share."""
    centres = rng.normal(size=(clusters, *shape[2:]))
    return centres[rng.integers(clusters, size=shape[:2])] + spread * rng.normal(size=shape)


def path_inputs(rng, batch, time, query_heads, heads, gate, dim=16):
    """Return {name: float32 array} for one case of PaTH."""
    q, cotangent = rng.normal(size=(2, batch, time, query_heads, dim))
    k = clustered(rng, (batch, time, heads, dim))
    v = rng.normal(size=k.shape)
    w = k + 0.5 * rng.normal(size=k.shape)  # close to its key, so that H_t changes the logits a lot
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = rng.uniform(0.05, 1.95, size=k.shape[:3])
    g = np.log(rng.uniform(0.9, 1.0, size=q.shape[:3])) if gate else np.zeros(q.shape[:3])
    # few digits, because they compress
    q, k, v, cotangent = (np.round(16 * x) / 16 for x in (q, k, v, cotangent))
    inputs = {"q": q, "k": k, "v": v, "w": w, "beta": beta, "g": g, "cotangent": cotangent}
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def path_entries():
    """Return the entries of path_fla.npz, without `versions`."""
    import torch

    naive_path_attn = references("path_attn").naive_path_attn
    rng = np.random.default_rng(20260)
    entries = {}
    for case, how in PATH_CASES.items():
        chunk_size = how["chunk_size"]
        arrays = path_inputs(rng, **{n: value for n, value in how.items() if n != "chunk_size"})
        scale = arrays["q"].shape[-1] ** -0.5
        leaves = {
            name: torch.tensor(x, requires_grad=True)
            for name, x in arrays.items()
            if name != "cotangent"
        }
        out = naive_path_attn(**leaves, scale=scale, chunk_size=chunk_size)
        assert out.dtype == torch.float32
        (out * torch.tensor(arrays["cotangent"])).sum().backward()
        arrays["out"] = out.detach().numpy()
        arrays |= {f"grad_{name}": leaf.grad.numpy() for name, leaf in leaves.items()}
        arrays |= {"scale": np.float64(scale), "chunk_size": np.int64(chunk_size)}
        entries |= {f"{case}_{name}": x for name, x in arrays.items()}
    return entries


def differential_entries():
    """Return the entries of differential_diffllama.npz, without `versions`."""
    import torch
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    batch, time = 2, 17
    config = DiffLlamaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        attn_implementation="eager",
    )
    module = DiffLlamaAttention(config, layer_idx=1).double().eval()
    rng = np.random.default_rng(20261)
    hidden = torch.tensor(clustered(rng, (batch, time, config.hidden_size)))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # logits of a few units, and λ far from lambda_init
            size = 0.5 if name.startswith("lambda") else 1.3 * config.hidden_size**-0.5
            parameter.copy_(torch.tensor(size * rng.normal(size=parameter.shape)))

    # The peer pairs query head h with h + 4. With two query heads for each key head, h reads the
    # key of h // 2 and h + 4 that of h // 2 + 2; both read the values of h // 2 and h // 2 + 2,
    # side by side along the width. Heads are axis 2 of `difference`: pair h is difference[:, :, h].
    given = {}
    for name in ("groupnorm", "o_proj"):
        getattr(module, name).register_forward_pre_hook(
            lambda _module, args, name=name: given.update({name: args[0].numpy().copy()})
        )
    mask = torch.full((1, 1, time, time), -torch.inf, dtype=torch.float64).triu(1)
    ones = torch.ones(batch, time, config.head_dim, dtype=torch.float64)
    with torch.no_grad():
        module(hidden, position_embeddings=(ones, 0 * ones), attention_mask=mask)
        projections = {
            name: getattr(module, f"{name}_proj")(hidden).unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        }
        exponents = [
            (module.lambda_q1 * module.lambda_k1).sum(dtype=torch.float32),
            (module.lambda_q2 * module.lambda_k2).sum(dtype=torch.float32),
        ]
        lambda_1, lambda_2 = (x.exp().double().item() for x in exponents)
    assert given["groupnorm"].shape == (batch, time, 4, 16)
    return {name: x.numpy() for name, x in projections.items()} | {
        "scale": np.float64(module.scaling),
        "lam": np.float64(lambda_1 - lambda_2 + module.lambda_init),
        "lambda_init": np.float64(module.lambda_init),
        "difference": given["groupnorm"],
        "before_o_proj": given["o_proj"],
    }


def sixteenths(x):
    """Round to multiples of 1/16: few digits, because they compress."""
    return np.round(16 * x) / 16


def normal(rng, *shape):
    """Return normal numbers of few digits."""
    return sixteenths(rng.normal(size=shape))


def keys_of(rng, *shape, unit=False):
    """Return clustered keys, every fourth equal to the one before it."""
    k = sixteenths(clustered(rng, shape))
    k[:, 1::4] = k[:, :-1:4]
    return k / np.linalg.norm(k, axis=-1, keepdims=True) if unit else k


def gates_of(rng, *shape):
    """Return logs of gates; some are 0, open, and some −8, all but closed."""
    kind = rng.random(size=shape)
    g = -sixteenths(rng.exponential(0.15, size=shape))
    return np.where(kind < 0.04, -8, np.where(kind > 0.8, 0, g))


def betas_of(rng, *shape):
    """Return numbers in [0, 2], some of them 0 and some 2."""
    kind = rng.random(size=shape)
    beta = sixteenths(rng.uniform(0, 2, size=shape))
    return np.where(kind < 0.1, 0, np.where(kind > 0.9, 2, beta))


def stateful_entries(rng, peer, inputs, initial=None):
    """Return one case: the inputs, the peer's outputs, and its gradients.

    `peer(x, initial)` takes tensors by name, laid out as the entries are, and returns the output
    and the final states by the names of the initial ones.
    """
    import torch

    given = inputs | {f"initial_{name}": state for name, state in (initial or {}).items()}
    given = {name: x.astype(np.float32) for name, x in given.items()}
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in given.items()}
    out, final = peer(
        {name: leaves[name] for name in inputs},
        {name: leaves[f"initial_{name}"] for name in initial or {}},
    )
    assert sorted(final) == sorted(initial or {})
    results = {"out": out} | {f"final_{name}": state for name, state in final.items()}
    total, cotangents = 0, {}
    for name, x in results.items():
        assert x.dtype == torch.float32
        cotangent = normal(rng, *x.shape).astype(np.float32)
        total = total + (x * torch.tensor(cotangent)).sum()
        cotangents[name.replace("final", "cotangent").replace("out", "cotangent")] = cotangent
    total.backward()
    return (
        given
        | {name: x.detach().numpy() for name, x in results.items()}
        | cotangents
        | {f"grad_{name}": leaf.grad.numpy() for name, leaf in leaves.items()}
    )


def of_cases(**cases):
    """Return {case_entry: array}."""
    return {f"{case}_{name}": x for case, entries in cases.items() for name, x in entries.items()}


def linear_entries():
    """Return the entries of linear_fla.npz, without `versions`."""

    def linear(x, initial):
        out, state = references("linear_attn").naive_recurrent_linear_attn(
            **x, initial_state=initial["state"], output_final_state=True
        )
        return out, {"state": state}

    def normalized(x, initial):
        # The mass of the peer has an axis for time.
        out, (state, mass) = references("linear_attn").naive_recurrent_linear_attn(
            **x,
            initial_state=(initial["state"], initial["mass"][:, None]),
            output_final_state=True,
            normalize=True,
        )
        return out, {"state": state, "mass": mass[:, 0]}

    def retention(x, _initial):
        time_behind_heads = (x[name].transpose(1, 2) for name in "qkv")
        return references("retention").naive_retention(*time_behind_heads).transpose(1, 2), {}

    def gla(x, initial):
        out, state = references("gla").naive_recurrent_gla(
            x["q"], x["k"], x["v"], x["g"], initial["state"], output_final_state=True
        )
        return out, {"state": state}

    def simple(x, initial):
        out, state = references("simple_gla").naive_recurrent_simple_gla(
            **x, initial_state=initial["state"], output_final_state=True
        )
        return out, {"state": state}

    rng = np.random.default_rng(20262)
    batch, time, heads, dim, width = 2, 33, 3, 8, 6

    def inputs():
        return {
            "q": normal(rng, batch, time, heads, dim),
            "k": keys_of(rng, batch, time, heads, dim),
            "v": normal(rng, batch, time, heads, width),
        }

    def state():
        return {"state": normal(rng, batch, heads, dim, width)}

    positive = inputs()  # a denominator far from 0
    positive |= {name: np.abs(positive[name]) for name in "qk"}
    mass = {"mass": np.abs(normal(rng, batch, heads, dim))}
    channels = {"g": gates_of(rng, batch, time, heads, dim)}
    scalars = {"g": gates_of(rng, batch, time, heads)}
    return of_cases(
        linear=stateful_entries(rng, linear, inputs(), state()),
        normalized=stateful_entries(rng, normalized, positive, state() | mass),
        retention=stateful_entries(rng, retention, inputs()),
        gla=stateful_entries(rng, gla, inputs() | channels, state()),
        simple=stateful_entries(rng, simple, inputs() | scalars, state()),
    )


def rwkv6_entries():
    """Return the entries of rwkv6_fla.npz, without `versions`."""

    def rwkv6(x, initial):
        rows = (x[name].transpose(1, 2) for name in "qkvg")
        out, state = references("rwkv6", "recurrent_naive").naive_recurrent_rwkv6(
            *rows, x["u"], 1.0, initial["state"], output_final_state=True
        )
        return out.transpose(1, 2), {"state": state}

    rng = np.random.default_rng(20280)
    batch, time, heads, dim, width = 2, 33, 3, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim),
        "v": normal(rng, batch, time, heads, width),
        "g": gates_of(rng, batch, time, heads, dim),
        "u": normal(rng, heads, dim),
    }
    initial = {"state": normal(rng, batch, heads, dim, width)}
    return of_cases(rwkv6=stateful_entries(rng, rwkv6, inputs, initial))


def hgrn2_entries():
    """Return the entries of hgrn2_fla.npz, without `versions`."""

    def hgrn2(x, initial):
        out, state = references("gla").naive_recurrent_gla(
            x["q"], 1 - x["g"].exp(), x["v"], x["g"], initial["state"], output_final_state=True
        )
        return out, {"state": state}

    rng = np.random.default_rng(20290)
    batch, time, heads, dim, width = 2, 33, 3, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "v": normal(rng, batch, time, heads, width),
        "g": gates_of(rng, batch, time, heads, dim),
    }
    initial = {"state": normal(rng, batch, heads, dim, width)}
    return of_cases(hgrn2=stateful_entries(rng, hgrn2, inputs, initial))


def delta_entries():
    """Return the entries of delta_fla.npz, without `versions`."""

    def delta(x, initial):
        time_behind_heads = {name: array.transpose(1, 2) for name, array in x.items()}
        out, state = references("delta_rule").delta_rule_recurrence(
            **time_behind_heads, initial_state=initial["state"]
        )
        return out.transpose(1, 2), {"state": state}

    def recurrent(x, initial):
        out, state = references("gated_delta_rule").naive_recurrent_gated_delta_rule(
            **x, initial_state=initial["state"], output_final_state=True
        )
        return out, {"state": state}

    def chunk(x, initial):
        out, state = references("gated_delta_rule").naive_chunk_gated_delta_rule(
            **x, chunk_size=16, initial_state=initial["state"], output_final_state=True
        )
        return out, {"state": state}

    rng = np.random.default_rng(20263)
    batch, time, heads, dim, width = 2, 33, 3, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim, unit=True),
        "v": normal(rng, batch, time, heads, width),
        "beta": betas_of(rng, batch, time, heads),
    }
    gated = inputs | {"g": gates_of(rng, batch, time, heads)}
    initial = {"state": normal(rng, batch, heads, dim, width)}
    return of_cases(
        delta=stateful_entries(rng, delta, inputs, initial),
        recurrent=stateful_entries(rng, recurrent, gated, initial),
        chunk=stateful_entries(rng, chunk, gated, initial),
    )


def kda_entries():
    """Return the entries of kda_fla.npz, without `versions`."""
    rng = np.random.default_rng(20268)
    batch, time, heads, value_heads, dim, width = 2, 32, 2, 4, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim, unit=True),
        "v": normal(rng, batch, time, value_heads, width),
        "g": gates_of(rng, batch, time, value_heads, dim),
        "beta": betas_of(rng, batch, time, value_heads),
    }
    initial = {"state": normal(rng, batch, value_heads, dim, width)}
    recurrent = of_naive("kda", "naive_recurrent_kda")
    chunk = of_naive("kda", "naive_chunk_kda", chunk_size=16)
    return of_cases(
        kda=stateful_entries(rng, recurrent, inputs, initial),
        kda_chunk=stateful_entries(rng, chunk, inputs, initial),
    )


def erasing_inputs(rng):
    """Return q, k, v and beta in [0, 1], and the initial state."""
    batch, time, heads, dim, width = 2, 33, 3, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim, unit=True),
        "v": normal(rng, batch, time, heads, width),
        "beta": betas_of(rng, batch, time, heads) / 2,
    }
    return inputs, {"state": normal(rng, batch, heads, dim, width)}


def of_naive(operation, name, **options):
    """Return the call of a reference that takes and returns a state."""

    def call(x, initial):
        out, state = getattr(references(operation), name)(
            **x, initial_state=initial["state"], output_final_state=True, **options
        )
        return out, {"state": state}

    return call


def gdn2_entries():
    """Return the entries of gdn2_fla.npz, without `versions`."""
    rng = np.random.default_rng(20272)
    inputs, initial = erasing_inputs(rng)
    shape, values = inputs["k"].shape, inputs["v"].shape
    del inputs["beta"]
    inputs |= {"g": gates_of(rng, *shape), "b": betas_of(rng, *shape)}
    inputs["w"] = betas_of(rng, *values) / 2
    peer = of_naive("gdn2", "naive_recurrent_gdn2")
    return of_cases(gdn2=stateful_entries(rng, peer, inputs, initial))


def comba_entries():
    """Return the entries of comba_fla.npz, without `versions`."""
    rng = np.random.default_rng(20273)
    inputs, initial = erasing_inputs(rng)
    inputs["p"] = keys_of(rng, *inputs["k"].shape, unit=True)
    inputs["g"] = gates_of(rng, *inputs["beta"].shape)
    recurrent = of_naive("comba", "naive_recurrent_comba")
    chunk = of_naive("comba", "naive_chunk_comba", chunk_size=16)
    return of_cases(
        comba=stateful_entries(rng, recurrent, inputs, initial),
        comba_chunk=stateful_entries(rng, chunk, inputs, initial),
    )


def dplr_entries():
    """Return the entries of dplr_fla.npz, without `versions`."""

    def call(x, initial):
        rows = {"q": "q", "k": "k", "v": "v", "a": "alpha", "b": "beta", "g": "gk"}
        time_behind_heads = {rows[name]: array.transpose(1, 2) for name, array in x.items()}
        out, state = references("generalized_delta_rule/dplr").dplr_recurrence(
            **time_behind_heads, initial_state=initial["state"]
        )
        return out.transpose(1, 2), {"state": state}

    rng = np.random.default_rng(20276)
    inputs, initial = erasing_inputs(rng)
    del inputs["beta"]
    shape = inputs["k"].shape
    inputs |= {name: keys_of(rng, *shape, unit=True) for name in "ab"}
    inputs["g"] = gates_of(rng, *shape)
    return of_cases(dplr=stateful_entries(rng, call, inputs, initial))


def delta_product_entries():
    """Return the entries of delta_product_fla.npz, without `versions`."""

    def call(x, initial):
        out, state = references("gated_delta_product").naive_recurrent_gated_delta_product(
            **x,
            scale=x["q"].shape[-1] ** -0.5,
            initial_state=initial["state"],
            output_final_state=True,
            num_householder=3,
        )
        return out, {"state": state}

    rng = np.random.default_rng(20275)
    batch, time, heads, dim, width = 2, 17, 2, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, 3 * time, heads, dim, unit=True),
        "v": normal(rng, batch, 3 * time, heads, width),
        "g": gates_of(rng, batch, time, heads),
        "beta": betas_of(rng, batch, 3 * time, heads),
    }
    initial = {"state": normal(rng, batch, heads, dim, width)}
    return of_cases(delta_product=stateful_entries(rng, call, inputs, initial))


def atk_entries():
    """Return the entries of atk_fla.npz, without `versions`."""

    def of(operation):
        naive = getattr(references(operation), f"naive_recurrent_{operation}")

        def call(x, initial):
            out, state, squares = naive(
                **x,
                initial_state=initial["state"],
                initial_A_state=initial["squares"],
                output_final_state=True,
            )
            return out, {"squares": squares, "state": state}

        return call

    rng = np.random.default_rng(20274)
    batch, time, heads, dim, width = 2, 24, 2, 8, 6

    def inputs(value_heads, *channels):
        return {
            "q": normal(rng, batch, time, heads, dim),
            "k": keys_of(rng, batch, time, heads, dim, unit=True),
            "v": normal(rng, batch, time, value_heads, width),
            "g": gates_of(rng, batch, time, value_heads, *channels),
            "beta": betas_of(rng, batch, time, value_heads) / 2,
            "g_atk": gates_of(rng, batch, time, heads),
            "beta_atk": betas_of(rng, batch, time, heads) / 2,
        }

    def initial(value_heads):
        return {
            "squares": np.abs(normal(rng, batch, heads, dim)),
            "state": normal(rng, batch, value_heads, dim, width),
        }

    pgdn, pkda = inputs(2 * heads), inputs(heads, dim)
    pkda["log_atk_scale"] = normal(rng, heads)
    return of_cases(
        pgdn=stateful_entries(rng, of("precond_gated_delta_rule"), pgdn, initial(2 * heads)),
        pkda=stateful_entries(rng, of("precond_kda"), pkda, initial(heads)),
    )


def gsa_entries():
    """Return the entries of gsa_fla.npz, without `versions`."""

    def gsa(x, initial):
        out, (keys, values) = references("gsa").naive_recurrent_gsa(
            **x,
            initial_state=(initial["keys"], initial["values"]),
            output_final_state=True,
        )
        return out, {"keys": keys, "values": values}

    rng = np.random.default_rng(20264)
    batch, time, query_heads, heads, dim, width, slots = 2, 33, 4, 2, 8, 6, 5
    inputs = {
        "q": normal(rng, batch, time, query_heads, dim),
        "k": keys_of(rng, batch, time, heads, dim),
        "v": normal(rng, batch, time, heads, width),
        "s": sixteenths(rng.uniform(size=(batch, time, heads, slots))),
        "g": gates_of(rng, batch, time, heads, slots),
    }
    initial = {
        "keys": normal(rng, batch, heads, dim, slots),
        "values": normal(rng, batch, heads, slots, width),
    }
    return of_cases(gsa=stateful_entries(rng, gsa, inputs, initial))


def mesa_entries():
    """Return the entries of mesa_fla.npz, without `versions`."""

    def mesa(x, initial):
        return references("mesa_net").naive_mesa_net_exact(**x)[0], {}

    rng = np.random.default_rng(20276)
    batch, time, heads, dim = 2, 24, 2, 8
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim, unit=True),
        "v": normal(rng, batch, time, heads, dim),
        "g": gates_of(rng, batch, time, heads),
        "beta": betas_of(rng, batch, time, heads) / 2,
        "lamb": 0.25 + np.abs(normal(rng, heads, dim)),
    }
    return of_cases(mesa=stateful_entries(rng, mesa, inputs))


def deltaformer_entries():
    """Return the entries of deltaformer_fla.npz, without `versions`."""

    def deltaformer(x, initial):
        return references("deltaformer").naive_deltaformer_attn(**x), {}

    rng = np.random.default_rng(20267)
    batch, time, heads, dim = 2, 33, 3, 8
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim),
        "v": normal(rng, batch, time, heads, dim),
        "beta": betas_of(rng, batch, time, heads) / 2,
    }
    return of_cases(deltaformer=stateful_entries(rng, deltaformer, inputs))


def mlstm_entries():
    """Return the entries of mlstm_xlstm.npz, without `versions`."""
    import torch
    from transformers.models.xlstm.modeling_xlstm import mlstm_recurrent_sequence_native

    names = {"q": "query", "k": "key", "v": "value", "f": "fgate", "i": "igate"}

    def mlstm(x, state, mass, maximum):
        out, (state, mass, maximum) = mlstm_recurrent_sequence_native(
            **{names[name]: array.transpose(1, 2) for name, array in x.items()},
            c_initial=state,
            n_initial=mass,
            m_initial=maximum[..., None],
            return_last_states=True,
        )
        final = {"state": state, "mass": mass, "maximum": maximum[..., 0]}
        return out.transpose(1, 2), final

    def fresh(x, _initial):
        nothing = torch.zeros(batch, heads, dim, width)
        return mlstm(x, nothing, nothing[..., 0], nothing[..., 0, 0] - torch.inf)[0], {}

    rng = np.random.default_rng(20277)
    batch, time, heads, dim, width = 2, 33, 3, 8, 6

    def inputs(center):
        return {
            "q": normal(rng, batch, time, heads, dim),
            "k": keys_of(rng, batch, time, heads, dim),
            "v": normal(rng, batch, time, heads, width),
            "f": 2 + normal(rng, batch, time, heads),
            "i": center + normal(rng, batch, time, heads),
        }

    initial = {
        "state": normal(rng, batch, heads, dim, width),
        "mass": normal(rng, batch, heads, dim),
        "maximum": normal(rng, batch, heads) - 1,
    }
    positive = inputs(0)  # denominators far from 0
    positive |= {name: np.abs(positive[name]) for name in "qk"}
    positive["i"][:, 11::9] = 6
    return of_cases(
        continued=stateful_entries(rng, lambda x, past: mlstm(x, **past), inputs(-2), initial),
        fresh=stateful_entries(rng, fresh, positive),
    )


def qwen3_next_entries():
    """Return the entries of gated_delta_qwen3_next.npz, without `versions`."""
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    def of(function, **how):
        # Without its wrapper, which would prefer kernels where there are any.
        plain = inspect.unwrap(function)
        names = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta"}

        def call(x, initial):
            out, state = plain(
                **{names[name]: array for name, array in x.items()},
                initial_state=initial["state"],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                **how,
            )
            return out, {"state": state}

        return call

    rng = np.random.default_rng(20265)
    batch, time, heads, value_heads, dim, width = 2, 33, 2, 4, 8, 6
    inputs = {
        "q": normal(rng, batch, time, heads, dim),
        "k": keys_of(rng, batch, time, heads, dim),
        "v": normal(rng, batch, time, value_heads, width),
        "g": gates_of(rng, batch, time, value_heads),
        "beta": betas_of(rng, batch, time, value_heads),
    }
    # so short that the ε of the norm shows
    inputs["k"][:, 2::8] = 0
    inputs["k"][:, 2::8, :, 3] = 1 / 16
    initial = {"state": normal(rng, batch, value_heads, dim, width)}
    recurrent = of(peer.torch_recurrent_gated_delta_rule)
    chunk = of(peer.torch_chunk_gated_delta_rule, chunk_size=16)
    return of_cases(
        recurrent=stateful_entries(rng, recurrent, inputs, initial),
        chunk=stateful_entries(rng, chunk, inputs, initial),
    )


def mamba2_entries():
    """Return the entries of ssd_mamba2.npz, without `versions`."""
    from transformers.models.mamba2 import modeling_mamba2 as peer

    limits = (0.125, 1.75)

    def mamba2(x, initial):
        x = {"hidden_states" if name == "x" else name: array for name, array in x.items()}
        # The states of the peer are (batch, heads, value width, key width).
        out, state = inspect.unwrap(peer.mamba2_chunk_scan)(  # without its wrapper, as above
            **x,
            chunk_size=16,
            initial_states=initial["state"].transpose(2, 3) if initial else None,
            dt_softplus=True,
            dt_limit=limits,
            return_final_states=True,
        )
        return out, {"state": state.transpose(2, 3)} if initial else {}

    rng = np.random.default_rng(20266)
    batch, time, heads, groups, dim, width = 2, 33, 4, 2, 8, 6
    inputs = {
        "x": normal(rng, batch, time, heads, width),
        "dt": normal(rng, batch, time, heads),
        "A": np.asarray([0, -1 / 16, -1, -8]),
        "B": keys_of(rng, batch, time, groups, dim),
        "C": normal(rng, batch, time, groups, dim),
        "D": normal(rng, heads),
        "dt_bias": normal(rng, heads),
    }
    initial = {"state": normal(rng, batch, heads, dim, width)}
    dt_limits = dict(zip(("dt_min", "dt_max"), np.asarray(limits), strict=True))
    return of_cases(
        fresh=stateful_entries(rng, mamba2, inputs) | dt_limits,
        continued=stateful_entries(rng, mamba2, inputs, initial) | dt_limits,
    )


def onnx_entries():
    """Return the entries of linear_attention_onnx.npz, without `versions`."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    names = {"q": "query", "k": "key", "v": "value", "state": "past_state"}
    names |= {"g": "decay", "beta": "beta"}

    def run(rule, x):
        """Output and state of one node; heads are part of its last axis."""
        heads = {"q_num_heads": x["q"].shape[2], "kv_num_heads": x["k"].shape[2]}
        given = {
            names[n]: a if n == "state" or a.ndim == 3 else a.reshape(*a.shape[:2], -1)
            for n, a in x.items()
        }
        inputs = [n if n in given else "" for n in names.values()]
        outputs = ["output", "present_state"]
        node = helper.make_node("LinearAttention", inputs, outputs, update_rule=rule, **heads)
        graph = helper.make_graph(
            [node],
            "one",
            [
                helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape)
                for n, a in given.items()
            ],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
        out, state = ReferenceEvaluator(model).run(None, given)
        out = out.reshape(*x["q"].shape[:3], -1)
        return {**x, "initial_state": x["state"], "out": out, "final_state": state}

    rng = np.random.default_rng(20277)
    batch, time, heads, dim, width = 2, 17, 2, 8, 6

    def inputs(query_heads, *, unit=False):
        return {
            "q": normal(rng, batch, time, query_heads, dim),
            "k": keys_of(rng, batch, time, heads, dim, unit=unit),
            "v": normal(rng, batch, time, heads, width),
            "state": normal(rng, batch, heads, dim, width),
        }

    of_heads, of_channels = (batch, time, heads), (batch, time, heads, dim)
    retained = np.log(1 - 2.0 ** (-5 - np.arange(heads))) * np.ones(of_heads)
    beta = {"beta": betas_of(rng, *of_heads)}
    cases = {
        "linear": ("linear", inputs(4), {}),
        "retention": ("gated", inputs(2), {"g": retained.astype(np.float32)}),
        "gla": ("gated", inputs(4), {"g": gates_of(rng, *of_channels)}),
        "delta": ("delta", inputs(2, unit=True), beta),
        "gated_delta": (
            "gated_delta",
            inputs(2, unit=True),
            beta | {"g": gates_of(rng, *of_heads)},
        ),
        "kda": ("gated_delta", inputs(2, unit=True), beta | {"g": gates_of(rng, *of_channels)}),
    }
    entries = {case: run(rule, x | more) for case, (rule, x, more) in cases.items()}
    for entry in entries.values():
        del entry["state"]
    return of_cases(**entries)


def save(name, peer, entries):
    """Write the entries beside this script, with the versions, and print what was written."""
    used = (peer, "torch", "numpy")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in used)
    assert all(np.isfinite(x).all() for x in entries.values()), f"{name}: not finite"
    path = HERE / name
    np.savez_compressed(path, **entries, versions=np.array(versions))
    size = path.stat().st_size
    print(f"{name}: {size} bytes, {versions}")
    for entry, x in entries.items():
        print(f"    {entry:32} {x.dtype!s:8} {x.shape}")
    assert size < MAX_BYTES, "file too large"


RECURRENCES = {
    "linear_fla": (
        linear_entries,
        {
            "linear": "linear",
            "normalized": "linear[normalize=true]",
            "gla": "gla",
            "simple": "ssd[scale=none]",
        },
    ),
    "rwkv6_fla": (rwkv6_entries, {"rwkv6": "rwkv6[scale=1]"}),
    "hgrn2_fla": (hgrn2_entries, {"hgrn2": "hgrn2"}),
    "delta_fla": (
        delta_entries,
        {"delta": "delta", "recurrent": "gated_delta", "chunk": "gated_delta"},
    ),
    "kda_fla": (kda_entries, {"kda": "kda", "kda_chunk": "kda"}),
    "gdn2_fla": (gdn2_entries, {"gdn2": "gdn2"}),
    "comba_fla": (comba_entries, {"comba": "comba[erases=decayed]", "comba_chunk": "comba"}),
    "dplr_fla": (dplr_entries, {"dplr": "dplr"}),
    "atk_fla": (
        atk_entries,
        {"pgdn": "qk_norm[norm=l2,eps=0](atk)", "pkda": "atk[learned=true](kda)"},
    ),
    "gsa_fla": (gsa_entries, {"gsa": "gsa"}),
}
"""Files of flash-linear-attention's recurrences, and the mechanism of each case, which the tests
compare with it."""


def main():
    """Write all files."""
    save("path_fla.npz", "fla-core", path_entries())
    save("differential_diffllama.npz", "transformers", differential_entries())
    for file, (entries, _) in RECURRENCES.items():
        save(f"{file}.npz", "fla-core", entries())
    save("delta_product_fla.npz", "fla-core", delta_product_entries())
    save("mesa_fla.npz", "fla-core", mesa_entries())
    save("deltaformer_fla.npz", "fla-core", deltaformer_entries())
    save("mlstm_xlstm.npz", "transformers", mlstm_entries())
    save("gated_delta_qwen3_next.npz", "transformers", qwen3_next_entries())
    save("linear_attention_onnx.npz", "onnx", onnx_entries())
    save("ssd_mamba2.npz", "transformers", mamba2_entries())


if __name__ == "__main__":
    main()
