"""Save results of public implementations, so that tests compare with them without installing them.

All are in `results.npz`, whose entries are called PEER/ENTRY. The peers:

`path_fla`: flash-linear-attention's naive PaTH attention and its gradients, for three cases
(the prefix of the entries): `gqa`, four chunks and two query heads for each key head; `odd`, a
length that the chunk does not divide; `gate`, with a forget gate. float32, because the peer always
computes in float32.

    q, out, cotangent       (batch, time, query heads, dim)
    k, v, w                 (batch, time, heads, dim), w of unit norm
    beta                    (batch, time, heads), in (0, 2)
    g                       (batch, time, query heads), log of the gate; 0 but in `gate`
    scale, chunk_size       scalars
    grad_q … grad_g         gradients of sum(out * cotangent), of the shapes of the inputs

`differential_diffllama`: the differential attention of Transformers' DiffLlama, under a causal
mask, without rotation. float64, but the peer computes its softmax and exp(λ) in float32.

    q                       (batch, time, heads=8, dim=8), the output of q_proj; unscaled
    k, v                    (batch, time, key/value heads=4, dim=8), likewise
    scale                   scalar, of the logits
    lam, lambda_init        scalars: λ = exp(λq1·λk1) − exp(λq2·λk2) + lambda_init, its last term
    difference              (batch, time, pairs of heads=4, 2 dim=16), the input of its group norm
    before_o_proj           (batch, time, 64), the input of o_proj: (1 − lambda_init) times the
                            group norm of `difference`, the pairs side by side

Mechanisms with a state are these peers, by cases (the prefix of the entries), all in float32:

`linear_fla`: flash-linear-attention's naive references of linear attention (`linear`, and
`normalized`, with a denominator), of `retention`, of `gla`, and of `simple` GLA.
`rwkv6_fla`: that of RWKV-6, `rwkv6`, without a scale.
`hgrn2_fla`: that of gated linear attention, with the keys of HGRN2's gates, `hgrn2`.
`delta_fla`: those of `delta`, the delta rule, and of the gated one, token by token
(`recurrent`) and in chunks of 16 (`chunk`).
`kda_fla`: those of Kimi Delta Attention, with two value heads for each key head, token by token
(`kda`) and in chunks of 16 (`kda_chunk`).
`gdn2_fla`: that of Gated DeltaNet 2, `gdn2`. b in [0, 2], w in [0, 1].
`comba_fla`: those of Comba, token by token (`comba`, which reads p in the decayed state) and in
chunks of 16 (`comba_chunk`, which reads it before, as its kernels do). beta in [0, 1].
`dplr_fla`: that of DPLR, `dplr`, with a and b of length 1 as the peer's alpha and beta.
`delta_product_fla`: that of the gated DeltaProduct, `delta_product`, with three steps a token,
in the peer's layout: k, v and beta (batch, 3 time, heads, …).
`atk_fla`: those of the preconditioned delta rules, with two value heads for each key head in
`pgdn`, which normalises q and k itself, and with learnt centres in `pkda`. beta in [0, 1].
`gsa_fla`: that of gated slot attention, `gsa`, with two query heads for each key head.
`mesa_fla`: that of MesaNet with exact solves, `mesa`, without states. beta in [0, 1], lamb > 0.
`mlstm_xlstm`: the mLSTM of Transformers' xLSTM token by token, with the pre-activations f and i
of its gates, from a state (`continued`), and from nothing (`fresh`: a maximum of −∞), where q and k
are positive and some input gates are 6.
`deltaformer_fla`: that of DeltaFormer, `deltaformer`, which has no state. beta in [0, 1].
`gated_delta_qwen3_next`: the gated delta rule of Transformers' Qwen3-Next, `recurrent` and
`chunk`, with its L2 norm of queries and keys and two value heads for each key head.
`ssd_mamba2`: the chunked scan of Transformers' Mamba-2, with two groups of two heads, from
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

    python -m pip install -e '.[peers]' && python -m tests.mathematics.peers.make_fixtures
"""

import importlib.metadata
from functools import partial

import numpy as np

from tests.mathematics.peers import fla_entries, other_entries
from tests.mathematics.peers.entries import RESULTS


def named(name, package, entries):
    """The entries of a peer by their names in the file, with the versions, which it prints."""
    used = (package, "torch", "numpy")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in used)
    assert all(np.isfinite(x).all() for x in entries.values()), f"{name}: not finite"
    print(f"{name}: {versions}")
    for entry, x in entries.items():
        print(f"    {entry:32} {x.dtype!s:8} {x.shape}")
    return {f"{name}/{entry}": x for entry, x in entries.items()} | {f"{name}/versions": versions}


RECURRENCES = {
    "linear_fla": (
        fla_entries.linear_entries,
        {
            "linear": "linear",
            "normalized": "linear[normalize=true]",
            "gla": "gla",
            "simple": "ssd[scale=none]",
        },
    ),
    "rwkv6_fla": (partial(fla_entries.simple_entries, "rwkv6"), {"rwkv6": "rwkv6[scale=1]"}),
    "hgrn2_fla": (fla_entries.hgrn2_entries, {"hgrn2": "hgrn2"}),
    "delta_fla": (
        fla_entries.delta_entries,
        {"delta": "delta", "recurrent": "gated_delta", "chunk": "gated_delta"},
    ),
    "kda_fla": (partial(fla_entries.simple_entries, "kda"), {"kda": "kda", "kda_chunk": "kda"}),
    "gdn2_fla": (partial(fla_entries.simple_entries, "gdn2"), {"gdn2": "gdn2"}),
    "comba_fla": (
        partial(fla_entries.simple_entries, "comba"),
        {"comba": "comba[erases=decayed]", "comba_chunk": "comba"},
    ),
    "dplr_fla": (partial(fla_entries.simple_entries, "dplr"), {"dplr": "dplr"}),
    "atk_fla": (
        fla_entries.atk_entries,
        {"pgdn": "qk_norm[norm=l2,eps=0](atk)", "pkda": "atk[learned=true](kda)"},
    ),
    "gsa_fla": (fla_entries.gsa_entries, {"gsa": "gsa"}),
}
"""Peers of flash-linear-attention's recurrences, and the mechanism of each case, which the tests
compare with it."""


def main():
    """Write the file."""
    fla, transformers = "fla-core", "transformers"
    simple = fla_entries.simple_entries
    peers = (
        ("path_fla", fla, fla_entries.path_entries),
        ("differential_diffllama", transformers, other_entries.differential_entries),
        *((name, fla, entries) for name, (entries, _) in RECURRENCES.items()),
        ("delta_product_fla", fla, partial(simple, "delta_product")),
        ("mesa_fla", fla, fla_entries.mesa_entries),
        ("deltaformer_fla", fla, fla_entries.deltaformer_entries),
        ("mlstm_xlstm", transformers, other_entries.mlstm_entries),
        ("gated_delta_qwen3_next", transformers, other_entries.qwen3_next_entries),
        ("ssd_mamba2", transformers, other_entries.mamba2_entries),
    )
    results = {}
    for name, package, entries in peers:
        results |= named(name, package, entries())
    np.savez_compressed(RESULTS, **results)


if __name__ == "__main__":
    main()
