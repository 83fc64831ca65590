"""The definitions of the linear family: loops over tokens in PyTorch, and random problems.

S' = Γ_t S_{t−1}, then S_t = S' + k_t v_tᵀ, or S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ (delta rule), and
o_t = s S_tᵀ q_t; RWKV-6 reads S_{t−1} and adds its bonus. PyTorch's gradients of the loop are the
gradients expected.
"""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.mathematics.identities import assert_close

sampled = settings(
    max_examples=10, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# Query heads share key and value heads (SHARED), or value heads share query and key heads (OWN).
SHARED = {"q": "b t h d", "k": "b s n d", "v": "b s n e"}
OWN = {"q": "b t h d", "k": "b s h d", "v": "b s u e"}
SHAPES = {
    "linear": SHARED,
    "retention": SHARED,
    "ssd": OWN | {"g": "b s u"},
    "gla": SHARED | {"g": "b s n c"},
    "rwkv6": SHARED | {"g": "b s n c", "u": "h c"},
    "gsa": SHARED | {"s": "b s n m", "g": "b s n m"},
    "mlstm": SHARED | {"g": "b s h", "i": "b s h"},
    "delta": OWN | {"beta": "b s u"},
    "gated_delta": OWN | {"g": "b s u", "beta": "b s u"},
    "kda": OWN | {"g": "b s u c", "beta": "b s u"},
    "gdn2": OWN | {"g": "b s u c", "b": "b s u c", "w": "b s u e"},
    "dplr": OWN | {"a": "b s h d", "b": "b s h d", "g": "b s u c"},
    "comba": OWN | {"p": "b s h d", "g": "b s u", "beta": "b s u"},
}
"""The inputs of each recurrence: a new one is a row here. `written` tells most of them apart by
the inputs that they have."""
LAYERS = [
    *SHAPES,
    "linear[normalize=true]",
    "comba[erases=decayed]",
    "ssd[scale=none]",
    "gsa[scale=1]",
    "mlstm[eps=0.1]",
    "rwkv6[scale=1]",
    "delta[scale=1]",
    "elu1(linear[normalize=true,eps=0.1])",
    "elu1(retention)",
    "hedgehog(linear[scale=0.7,normalize=true])",
    "hedgehog[factor=2](ssd)",
    "hedgehog[per=head](gla)",
    "hedgehog[factor=2,per=head](gated_delta)",
    "hedgehog[factor=2](kda)",
    "hedgehog(rwkv6)",
    "qk_norm[norm=l2](delta)",
    "qk_norm[norm=l2,eps=0.1](gated_delta)",
]
GATED = [name for name, shapes in SHAPES.items() if "g" in shapes]
DELTA = [name for name, shapes in SHAPES.items() if "beta" in shapes or name == "gdn2"]


def bare(layer):
    while hasattr(layer, "base"):
        layer = layer.base
    return layer


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


class LinearProblem:
    """Random inputs and states of everything in `LAYERS`."""

    def __init__(self, rng, *, s, t=None, n=1, group=1, multiple=1, d=3, e=2, m=4, b=2):
        h = n * group
        self.rng, self.group, self.multiple = rng, group, multiple
        self.sizes = {"b": b, "s": s, "t": s if t is None else t, "n": n, "h": h, "u": h * multiple}
        self.sizes |= {"d": d, "e": e, "m": m}

    def shape(self, letters):
        return [self.sizes[letter] for letter in letters.split()]

    def x(self, layer):
        """All inputs of a layer, by name."""
        base, mapped = bare(layer), str(layer).startswith("hedgehog")
        self.sizes["c"] = self.sizes["d"] * (2 if mapped else 1)
        x = {
            name: self.rng.normal(size=self.shape(letters))
            for name, letters in SHAPES[base.name].items()
        }
        if base.name in DELTA:
            x["k"] = unit(x["k"])
        if base is layer and "normalize" in str(layer):
            x |= {"q": np.abs(x["q"]) + 0.1, "k": np.abs(x["k"]) + 0.1}
        if "g" in x:
            x["g"] = -(x["g"] ** 2)
        for name in "pab":
            if name in x and base.name != "gdn2":
                x[name] = unit(x[name])
        for name, most in [("beta", 2), ("s", 1), ("b", 2), ("w", 1)]:
            if name in x and (base.name, name) != ("dplr", "b"):
                x[name] = self.rng.uniform(0, most, size=x[name].shape)
        if mapped:
            k_heads = SHAPES[base.name]["k"].split()[2]
            for name, heads in [("q", "h"), ("k", k_heads)]:
                heads = heads if layer.per == "head" else ""
                x[f"{name}_weight"] = self.rng.normal(size=self.shape(f"{heads} d d"))
                x[f"{name}_bias"] = self.rng.normal(size=self.shape(f"{heads} d"))
        return x

    def states(self, cache):
        """States that are not zero; a sum of positive keys is positive."""
        arrays = {name: self.rng.normal(size=array.shape) for name, array in cache.store.items()}
        return {name: np.abs(a) if a.ndim == 3 else a for name, a in arrays.items()}

    def like(self, array):
        return self.rng.normal(size=array.shape)


@st.composite
def problems(draw, square=True, longest=7, heads=3):
    s = draw(st.integers(1, longest))
    return LinearProblem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        s=s,
        t=s if square else draw(st.integers(1, s)),
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, heads)),
        multiple=draw(st.integers(1, heads)),
        d=draw(st.integers(1, 5)),
        e=draw(st.integers(1, 3)),
        m=draw(st.integers(1, 4)),
    )


# The definitions


def timed(name):
    return name != "u" and not name.endswith(("_weight", "_bias"))


def of_tokens(x, chosen):
    """Inputs at some times; what belongs to a head or a layer has no time axis."""
    return {name: array[:, chosen] if timed(name) else array for name, array in x.items()}


def alone(x, i, kept):
    """One sequence of a batch at some times."""
    return {n: a[i : i + 1, kept] if timed(n) else a for n, a in x.items()}


def features(layer, x):
    """Maps of queries and keys, from the outside in."""
    x = dict(x)
    while hasattr(layer, "base"):
        for name in "qk":
            y = x[name]
            match layer.name:
                case "elu1":
                    y = torch.where(y > 0, y + 1, torch.exp(y))
                case "hedgehog":
                    weight, bias = x.pop(f"{name}_weight"), x.pop(f"{name}_bias")
                    y = layer.factor * ((weight @ y[..., None])[..., 0] + bias)
                    y = torch.softmax(torch.cat([y, -y], dim=-1), dim=-1)
                case "qk_norm":
                    y = y / torch.sqrt((y * y).sum(-1, keepdim=True) + layer.eps)
            x[name] = y
        layer = layer.base
    return layer, x


def of_heads(array, heads):
    return array.repeat_interleave(heads // array.shape[2], dim=2)


def outer(a, b):
    return a[..., :, None] * b[..., None, :]


def written(layer, token, states):
    """The states with one more token."""
    k, v, g = token["k"], token["v"], token.get("g")
    first = states[0]
    match layer.name:
        case "linear":
            return [first + outer(k, v), *(mass + k for mass in states[1:])]
        case "retention":
            gamma = 1 - 2.0 ** (-5 - torch.arange(k.shape[1], dtype=k.dtype))
            return [gamma[:, None, None] * first + outer(k, v)]
        case "ssd":
            return [torch.exp(g)[..., None, None] * first + outer(k, v)]
        case "gla" | "rwkv6":
            return [torch.exp(g)[..., None] * first + outer(k, v)]
        case "dplr":
            known = (first * token["a"][..., None]).sum(-2)
            return [torch.exp(g)[..., None] * first + outer(token["b"], known) + outer(k, v)]
        case "gsa":
            keys = torch.exp(g)[..., None, :] * first + outer(k, token["s"])
            return [keys, torch.exp(g)[..., None] * states[1] + outer(token["s"], v)]
        case "mlstm":
            maximum = torch.maximum(g + states[2], token["i"])
            kept, new = torch.exp(g + states[2] - maximum), torch.exp(token["i"] - maximum)
            matrix = kept[..., None, None] * first + new[..., None, None] * outer(k, v)
            return [matrix, kept[..., None] * states[1] + new[..., None] * k, maximum]
    erased = token.get("p", k)
    if getattr(layer, "erases", None) == "undecayed":
        known = (first * erased[..., None]).sum(-2)
        decayed = torch.exp(g)[..., None, None] * first
        return [decayed + outer(k, token["beta"][..., None] * (v - known))]
    if g is not None:
        decay = torch.exp(g)[..., None]
        first = (decay if decay.ndim == first.ndim else decay[..., None]) * first
    if layer.name == "gdn2":
        known = (first * (token["b"] * k)[..., None]).sum(-2)
        return [first + outer(k, token["w"] * v - known)]
    known = (first * erased[..., None]).sum(-2)
    return [first + outer(k, token["beta"][..., None] * (v - known))]


def read(layer, q, states):
    scale = q.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    states = [of_heads(state[:, None], q.shape[1])[:, 0] for state in states]
    result = scale * (states[0] * q[..., None]).sum(-2)
    if layer.name == "gsa":
        return (states[1] * torch.softmax(result, dim=-1)[..., None]).sum(-2)
    if layer.name == "mlstm":
        total = torch.abs(scale * (states[1] * q).sum(-1))
        total = torch.maximum(total, torch.exp(-states[2])) + layer.eps
        return result / total[..., None]
    if len(states) == 2:
        result = result / (scale * (states[1] * q).sum(-1, keepdim=True) + layer.eps)
    return result


def with_bonus(layer, q, u, k, v, states):
    """What RWKV-6 reads in the states before a token, and the token with its bonus."""
    k, v = (of_heads(rows[:, None], q.shape[1])[:, 0] for rows in (k, v))
    scale = q.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    return read(layer, q, states) + scale * (q * u * k).sum(-1, keepdim=True) * v


def scan(layer, x, states=None, is_written=None):
    """Outputs and last states, token by token; `is_written` (b, s) selects the tokens to write."""
    layer, x = features(layer, x)
    (b, t, h, d), (s, n) = x["q"].shape, x["k"].shape[1:3]
    u, e = x["v"].shape[2:]
    q, heads = (
        of_heads(x.pop("q"), max(h, u)),
        {"retention": h, "mlstm": h}.get(layer.name, max(n, u)),
    )
    bonus = x.pop("u", None)
    x = {name: of_heads(array, heads) for name, array in x.items()}
    if states is None:
        shapes = [(d, e), (d,)] if getattr(layer, "normalize", False) else [(d, e)]
        shapes = [(d, x["s"].shape[-1]), (x["s"].shape[-1], e)] if "s" in x else shapes
        states = [torch.zeros(b, heads, *shape, dtype=q.dtype) for shape in shapes]
        if layer.name == "mlstm":
            states += [states[0][..., 0], states[0][..., 0, 0] - torch.inf]
    outs = []
    for j in range(s):
        new = written(layer, {name: array[:, j] for name, array in x.items()}, states)
        if is_written is not None:
            kept = [
                torch.as_tensor(is_written[:, j]).reshape(b, *[1] * (a.ndim - 1)) for a in states
            ]
            new = [torch.where(*both) for both in zip(kept, new, states, strict=True)]
        if j >= s - t and bonus is None:
            outs.append(read(layer, q[:, j - s + t], new))
        elif j >= s - t:
            k = x["k"][:, j]
            if is_written is not None:
                k = k * torch.as_tensor(is_written[:, j]).reshape(b, 1, 1)
            outs.append(with_bonus(layer, q[:, j - s + t], bonus, k, x["v"][:, j], states))
        states = new
    return torch.stack(outs, dim=1), states


def tensors(arrays, grad=False):
    return {name: torch.tensor(array, requires_grad=grad) for name, array in arrays.items()}


def expected_vjp(layer, x, d_out, states=None, d_last=None, is_written=None):
    """Output and last states of the loop; PyTorch's gradients for inputs and initial states."""
    x = tensors(x, grad=True)
    first = None if states is None else tensors(states, grad=True)
    out, last = scan(layer, x, first and list(first.values()), is_written)
    total = (out * torch.tensor(d_out)).sum()
    for state, cotangent in zip(last, (d_last or {}).values(), strict=d_last is not None):
        total = total + (state * torch.tensor(cotangent)).sum()
    leaves = {**x, **(first or {})}
    result = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    gradients = {name: g.numpy() for name, g in zip(leaves, result, strict=True)}
    d_first = {name: gradients.pop(name) for name in first or {}}
    return out.detach().numpy(), [a.detach().numpy() for a in last], gradients, d_first


def definition(layer, x, states=None, is_written=None):
    states = None if states is None else list(tensors(states).values())
    out, last = scan(layer, tensors(x), states, is_written)
    return out.numpy(), [state.numpy() for state in last]


def close(result, expected):
    """`assert_close`, of arrays or dicts of them, where all of them may be 0."""
    if isinstance(expected, dict):
        assert set(result) == set(expected)
        for name in expected:
            assert result[name].shape == expected[name].shape
            close(result[name], expected[name])
        return
    assert np.shape(result) == np.shape(expected)
    assert np.all(np.isfinite(result))
    assert_close(result, expected, size=1 + np.max(np.abs(expected), initial=0.0))


def close_to_definition(layer, p, x, states=None, is_written=None, **masks):
    """Output and gradients of a full call, or with states those of an extension."""
    if states is None:
        out, pullback = layer.vjp(**x, **masks)
        d_out = p.like(out)
        expected, _, expected_gradients, _ = expected_vjp(layer, x, d_out, is_written=is_written)
        close(out, expected)
        close(pullback(d_out), expected_gradients)
        return
    cache = layer.init_cache(**x)._replace(store=states)
    out, last, pullback = layer.extend_vjp(cache, **x, **masks)
    d_out, d_last = p.like(out), {name: p.like(array) for name, array in states.items()}
    expected, expected_last, *expected_gradients = expected_vjp(
        layer, x, d_out, states, d_last, is_written
    )
    close(out, expected)
    close(last.store, dict(zip(states, expected_last, strict=True)))
    for result, wanted in zip(pullback(d_out, d_last), expected_gradients, strict=True):
        close(result, wanted)
