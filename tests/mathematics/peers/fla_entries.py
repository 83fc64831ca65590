"""The entries of each file of flash-linear-attention's references, without `versions`."""

import numpy as np

from precondattn_conformance.peers.fla import references
from tests.mathematics.peers.entries import clustered, drawn, of_cases, stateful_entries

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
    """Return the entries of path_fla, without `versions`."""
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


def of_naive(operation, name, *modules, order=None, rename=(), heads_first=False, **options):
    """Return the call of a reference that takes and returns a state.

    `order` has the names of positional arguments, `rename` the reference's own names.
    """

    def call(x, initial):
        x = {
            dict(rename).get(n, n): a.transpose(1, 2) if heads_first and a.ndim > 2 else a
            for n, a in x.items()
        }
        rows = [x.pop(n) for n in order or ()]
        naive = getattr(references(operation, *modules), name)
        out, state = naive(*rows, **x, initial_state=initial["state"], **options)
        return out.transpose(1, 2) if heads_first else out, {"state": state}

    return call


SIZES = {"b": 2, "t": 33, "h": 3, "d": 8, "e": 6}
STATE = "state:normal:bhde"
LAST = {"output_final_state": True}
SIMPLE = {
    # The seed, the sizes beside SIZES, the inputs, and the references, by cases.
    "rwkv6": (
        20280,
        {},
        "q:normal:bthd k:keys:bthd v:normal:bthe g:gates:bthd u:normal:hd",
        {
            "rwkv6": of_naive(
                *("rwkv6", "naive_recurrent_rwkv6", "recurrent_naive"),
                **{"order": "qkvgu", "heads_first": True, "scale": 1.0},
                **LAST,
            )
        },
    ),
    "kda": (
        20268,
        {"t": 32, "h": 2, "u": 4},
        "q:normal:bthd k:unit:bthd v:normal:btue g:gates:btud beta:betas:btu",
        {
            "kda": of_naive("kda", "naive_recurrent_kda", **LAST),
            "kda_chunk": of_naive("kda", "naive_chunk_kda", chunk_size=16, **LAST),
        },
    ),
    "comba": (
        20273,
        {},
        "q:normal:bthd k:unit:bthd v:normal:bthe beta:halves:bth STATE p:unit:bthd g:gates:bth",
        {
            "comba": of_naive("comba", "naive_recurrent_comba", **LAST),
            "comba_chunk": of_naive("comba", "naive_chunk_comba", chunk_size=16, **LAST),
        },
    ),
    "dplr": (
        20276,
        {},
        "q:normal:bthd k:unit:bthd v:normal:bthe unused:halves:bth STATE"
        " a:unit:bthd b:unit:bthd g:gates:bthd",
        {
            "dplr": of_naive(
                *("generalized_delta_rule/dplr", "dplr_recurrence"),
                rename={"a": "alpha", "b": "beta", "g": "gk"},
                heads_first=True,
            )
        },
    ),
    "gdn2": (
        20272,
        {},
        "q:normal:bthd k:unit:bthd v:normal:bthe unused:halves:bth STATE"
        " g:gates:bthd b:betas:bthd w:halves:bthe",
        {"gdn2": of_naive("gdn2", "naive_recurrent_gdn2", **LAST)},
    ),
    "delta_product": (
        20275,
        {"t": 17, "h": 2, "s": 51},
        "q:normal:bthd k:unit:bshd v:normal:bshe g:gates:bth beta:betas:bsh",
        {
            "delta_product": of_naive(
                *("gated_delta_product", "naive_recurrent_gated_delta_product"),
                **{"scale": 8**-0.5, "num_householder": 3},
                **LAST,
            )
        },
    ),
}


def simple_entries(name):
    """Return the entries of a file in SIMPLE. The state is drawn last, or where STATE says."""
    seed, more, words, cases = SIMPLE[name]
    rng = np.random.default_rng(seed)
    sizes = {**SIZES, **more}
    sizes.setdefault("u", sizes["h"])
    state = "state:normal:bude"
    words = words.replace("STATE", state) if "STATE" in words else f"{words} {state}"
    x = drawn(rng, sizes, words)
    x.pop("unused", None)
    initial = {"state": x.pop("state")}
    return of_cases(
        **{case: stateful_entries(rng, peer, x, initial) for case, peer in cases.items()}
    )


QKV = "q:normal:bthd k:keys:bthd v:normal:bthe"


def linear_entries():
    """Return the entries of linear_fla, without `versions`."""

    def normalized(x, initial):
        # The mass of the peer has an axis for time.
        state = initial["state"], initial["mass"][:, None]
        naive = references("linear_attn").naive_recurrent_linear_attn
        out, (state, mass) = naive(**x, initial_state=state, normalize=True, **LAST)
        return out, {"state": state, "mass": mass[:, 0]}

    def retention(x, _initial):
        time_behind_heads = (x[name].transpose(1, 2) for name in "qkv")
        return references("retention").naive_retention(*time_behind_heads).transpose(1, 2), {}

    linear = of_naive("linear_attn", "naive_recurrent_linear_attn", **LAST)
    gla = of_naive("gla", "naive_recurrent_gla", order="qkvg", **LAST)
    simple = of_naive("simple_gla", "naive_recurrent_simple_gla", **LAST)
    rng = np.random.default_rng(20262)

    def draw(words):
        return drawn(rng, SIZES, words)

    positive = draw(QKV)  # a denominator far from 0
    positive |= {name: np.abs(positive[name]) for name in "qk"}
    mass = draw("mass:positive:bhd")
    channels, scalars = draw("g:gates:bthd"), draw("g:gates:bth")
    return of_cases(
        linear=stateful_entries(rng, linear, draw(QKV), draw(STATE)),
        normalized=stateful_entries(rng, normalized, positive, draw(STATE) | mass),
        retention=stateful_entries(rng, retention, draw(QKV)),
        gla=stateful_entries(rng, gla, draw(QKV) | channels, draw(STATE)),
        simple=stateful_entries(rng, simple, draw(QKV) | scalars, draw(STATE)),
    )


def hgrn2_entries():
    """Return the entries of hgrn2_fla, without `versions`."""

    def hgrn2(x, initial):
        rows = x["q"], 1 - x["g"].exp(), x["v"], x["g"], initial["state"]
        out, state = references("gla").naive_recurrent_gla(*rows, **LAST)
        return out, {"state": state}

    rng = np.random.default_rng(20290)
    x = drawn(rng, SIZES, f"q:normal:bthd v:normal:bthe g:gates:bthd {STATE}")
    return of_cases(hgrn2=stateful_entries(rng, hgrn2, x, {"state": x.pop("state")}))


def delta_entries():
    """Return the entries of delta_fla, without `versions`."""
    rng = np.random.default_rng(20263)
    x = drawn(rng, SIZES, "q:normal:bthd k:unit:bthd v:normal:bthe beta:betas:bth")
    gated, initial = x | drawn(rng, SIZES, "g:gates:bth"), drawn(rng, SIZES, STATE)
    delta = of_naive("delta_rule", "delta_rule_recurrence", heads_first=True)
    rule = "gated_delta_rule"
    recurrent = of_naive(rule, "naive_recurrent_gated_delta_rule", **LAST)
    chunk = of_naive(rule, "naive_chunk_gated_delta_rule", chunk_size=16, **LAST)
    return of_cases(
        delta=stateful_entries(rng, delta, x, initial),
        recurrent=stateful_entries(rng, recurrent, gated, initial),
        chunk=stateful_entries(rng, chunk, gated, initial),
    )


def atk_entries():
    """Return the entries of atk_fla, without `versions`."""

    def of(operation):
        naive = getattr(references(operation), f"naive_recurrent_{operation}")

        def call(x, initial):
            first = {"initial_state": initial["state"], "initial_A_state": initial["squares"]}
            out, state, squares = naive(**x, **first, **LAST)
            return out, {"squares": squares, "state": state}

        return call

    rng = np.random.default_rng(20274)
    pgdn, pkda = ({**SIZES, "t": 24, "h": 2, "u": u} for u in (4, 2))
    words = (
        "q:normal:bthd k:unit:bthd v:normal:btue g:gates:{} beta:halves:btu"
        " g_atk:gates:bth beta_atk:halves:bth"
    )
    states = "squares:positive:bhd state:normal:bude"
    x = drawn(rng, pgdn, words.format("btu"))
    y = drawn(rng, pkda, words.format("btud")) | drawn(rng, pkda, "log_atk_scale:normal:h")
    return of_cases(
        pgdn=stateful_entries(rng, of("precond_gated_delta_rule"), x, drawn(rng, pgdn, states)),
        pkda=stateful_entries(rng, of("precond_kda"), y, drawn(rng, pkda, states)),
    )


def gsa_entries():
    """Return the entries of gsa_fla, without `versions`."""

    def gsa(x, initial):
        first = initial["keys"], initial["values"]
        out, (keys, values) = references("gsa").naive_recurrent_gsa(
            **x, initial_state=first, **LAST
        )
        return out, {"keys": keys, "values": values}

    rng = np.random.default_rng(20264)
    sizes = {**SIZES, "h": 4, "n": 2, "m": 5}
    words = "q:normal:bthd k:keys:btnd v:normal:btne s:slots:btnm g:gates:btnm"
    x = drawn(rng, sizes, words)
    initial = drawn(rng, sizes, "keys:normal:bndm values:normal:bnme")
    return of_cases(gsa=stateful_entries(rng, gsa, x, initial))


def mesa_entries():
    """Return the entries of mesa_fla, without `versions`."""

    def mesa(x, initial):
        return references("mesa_net").naive_mesa_net_exact(**x)[0], {}

    rng = np.random.default_rng(20276)
    words = "q:normal:bthd k:unit:bthd v:normal:bthd g:gates:bth beta:halves:bth lamb:positive:hd"
    x = drawn(rng, {**SIZES, "t": 24, "h": 2}, words)
    x["lamb"] = 0.25 + x["lamb"]
    return of_cases(mesa=stateful_entries(rng, mesa, x))


def deltaformer_entries():
    """Return the entries of deltaformer_fla, without `versions`."""

    def deltaformer(x, initial):
        return references("deltaformer").naive_deltaformer_attn(**x), {}

    rng = np.random.default_rng(20267)
    x = drawn(rng, SIZES, "q:normal:bthd k:keys:bthd v:normal:bthd beta:halves:bth")
    return of_cases(deltaformer=stateful_entries(rng, deltaformer, x))
