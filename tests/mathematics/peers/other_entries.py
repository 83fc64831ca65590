"""The entries of each file of Transformers' references, without `versions`."""

import inspect

import numpy as np

from tests.mathematics.peers.entries import clustered, drawn, of_cases, stateful_entries


def differential_entries():
    """Return the entries of differential_diffllama, without `versions`."""
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


def mlstm_entries():
    """Return the entries of mlstm_xlstm, without `versions`."""
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
        nothing = torch.zeros(2, 3, 8, 6)
        return mlstm(x, nothing, nothing[..., 0], nothing[..., 0, 0] - torch.inf)[0], {}

    rng = np.random.default_rng(20277)
    sizes = {"b": 2, "t": 33, "h": 3, "d": 8, "e": 6}

    def inputs(center):
        words = "q:normal:bthd k:keys:bthd v:normal:bthe f:normal:bth i:normal:bth"
        x = drawn(rng, sizes, words)
        return x | {"f": 2 + x["f"], "i": center + x["i"]}

    initial = drawn(rng, sizes, "state:normal:bhde mass:normal:bhd maximum:normal:bh")
    initial["maximum"] -= 1
    positive = inputs(0)  # denominators far from 0
    positive |= {name: np.abs(positive[name]) for name in "qk"}
    positive["i"][:, 11::9] = 6
    return of_cases(
        continued=stateful_entries(rng, lambda x, past: mlstm(x, **past), inputs(-2), initial),
        fresh=stateful_entries(rng, fresh, positive),
    )


def qwen3_next_entries():
    """Return the entries of gated_delta_qwen3_next, without `versions`."""
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
    sizes = {"b": 2, "t": 33, "h": 2, "u": 4, "d": 8, "e": 6}
    words = "q:normal:bthd k:keys:bthd v:normal:btue g:gates:btu beta:betas:btu"
    inputs = drawn(rng, sizes, words)
    # so short that the ε of the norm shows
    inputs["k"][:, 2::8] = 0
    inputs["k"][:, 2::8, :, 3] = 1 / 16
    initial = drawn(rng, sizes, "state:normal:bude")
    recurrent = of(peer.torch_recurrent_gated_delta_rule)
    chunk = of(peer.torch_chunk_gated_delta_rule, chunk_size=16)
    return of_cases(
        recurrent=stateful_entries(rng, recurrent, inputs, initial),
        chunk=stateful_entries(rng, chunk, inputs, initial),
    )


def mamba2_entries():
    """Return the entries of ssd_mamba2, without `versions`."""
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
    sizes = {"b": 2, "t": 33, "u": 4, "h": 2, "d": 8, "e": 6}
    inputs = drawn(rng, sizes, "x:normal:btue dt:normal:btu") | {
        "A": np.asarray([0, -1 / 16, -1, -8]),
        **drawn(rng, sizes, "B:keys:bthd C:normal:bthd D:normal:u dt_bias:normal:u"),
    }
    initial = drawn(rng, sizes, "state:normal:bude")
    dt_limits = dict(zip(("dt_min", "dt_max"), np.asarray(limits), strict=True))
    return of_cases(
        fresh=stateful_entries(rng, mamba2, inputs) | dt_limits,
        continued=stateful_entries(rng, mamba2, inputs, initial) | dt_limits,
    )
