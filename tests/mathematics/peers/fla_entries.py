"""The entries of each file of flash-linear-attention's references, without `versions`."""

import numpy as np

from precondattn_conformance.peers.fla import references
from tests.mathematics.peers.entries import (
    betas_of,
    clustered,
    gates_of,
    keys_of,
    normal,
    of_cases,
    sixteenths,
    stateful_entries,
)

PATH_CASES = {
    "gqa": {"batch": 1, "time": 64, "query_heads": 4, "heads": 2, "chunk_size": 16, "gate": False},
    "odd": {"batch": 2, "time": 33, "query_heads": 2, "heads": 1, "chunk_size": 16, "gate": False},
    "gate": {"batch": 2, "time": 24, "query_heads": 4, "heads": 2, "chunk_size": 8, "gate": True},
}


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
