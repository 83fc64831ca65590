"""Layers of flash-linear-attention around its naive operators, which run on a CPU.

Its own layers need a GPU. Their `forward` is written down here in plain PyTorch, for the default
options or those named below; weights have the names of its modules. Each function is the call of a
dict of weights, which have the shapes below, and x.

    gla             num_kv_heads=2
    delta_net       the gate is 0 in the operator of the gated delta rule
    gated_delta_net, kda, gdn2, comba, precond_gated_delta_net, retention: expand_v=2
    gated_delta_product expand_v=2, num_householder=2
    hgrn2           num_heads=4 for a width of 32, the second layer, a lower bound of 0.25
    rwkv6           expand_k=1, norm_eps=8e-5, with a first mix of its own for each row
    rwkv7           the first layer, with ranks of 32
    gsa             num_kv_heads=2, num_slots=3
    path            use_forget_gate=True
    mesa_net        the exact solve in place of conjugate gradients
"""

import torch
from torch.nn.functional import conv1d, group_norm, logsigmoid, pad, silu, softplus

from precondattn_conformance.peers.fla import references

HEADS = 4


def maps(width=32, /, **widths):
    """The shapes of linear maps of rows of this width."""
    return {f"{name}.weight": (wide, width) for name, wide in widths.items()}


def projections(**widths):
    return maps(**{f"{name}_proj": width for name, width in widths.items()})


def convolutions(**widths):
    return {f"{name}_conv1d.weight": (width, 1, 4) for name, width in widths.items()}


def vectors(**widths):
    return {name.replace("__", "."): (width,) for name, width in widths.items()}


OUTPUT = {"o_proj.weight": (32, 32)}
DELTA, DELTA_WIDE = (
    {
        **projections(q=32, k=32, v=wide, b=4),
        **convolutions(q=32, k=32, v=wide),
        **vectors(o_norm__weight=wide // 4),
        "o_proj.weight": (32, wide),
    }
    for wide in (32, 64)
)
GATED_DELTA = {**DELTA_WIDE, **projections(a=4, g=64), **vectors(A_log=4, dt_bias=4)}
KDA = {
    **projections(q=32, k=32, v=64, b=4),
    **convolutions(q=32, k=32, v=64),
    **maps(**{"f_proj.0": 16}),
    **maps(16, **{"f_proj.1": 32}),
    **vectors(A_log=4, dt_bias=32),
    **maps(**{"g_proj.0": 16}),
    **maps(16, **{"g_proj.1": 64}),
    **vectors(g_proj__1__bias=64, o_norm__weight=16),
    "o_proj.weight": (32, 64),
}
SHAPES = {
    "gla": {
        **projections(q=32, k=16, v=16, g=32),
        **maps(**{"gk_proj.0": 16}),
        **maps(16, **{"gk_proj.1": 16}),
        **vectors(gk_proj__1__bias=16, g_norm_swish_gate__weight=8),
        **OUTPUT,
    },
    "delta_net": DELTA,
    "gated_delta_net": GATED_DELTA,
    "kda": KDA,
    "gdn2": {**KDA, **projections(b=32, w=64)},
    "comba": {**GATED_DELTA, **vectors(decay=4, D=4)},
    "mesa_net": {
        **projections(q=32, k=32, v=32, a=4, b=4),
        **vectors(a_proj__bias=4, b_proj__bias=4, lambda_params=32),
        **convolutions(q=32, k=32),
        **vectors(o_norm__weight=8),
        **OUTPUT,
    },
    "hgrn2": {**projections(q=32, f=32, i=32), **vectors(g_norm__weight=32), **OUTPUT},
    "rwkv6": {
        **projections(r=32, k=32, v=32, g=32),
        **vectors(**{f"x_proj.0.{name}.mu": 32 for name in "rwkvg"}),
        **maps(**{f"x_proj.0.{name}.linear": 6 for name in "rwkvg"}),
        **maps(6, **{f"x_proj.2.{name}": 32 for name in "rwkvg"}),
        "x_bias": (5, 32),
        **maps(**{"w_proj.lora.0": 7}),
        **maps(7, **{"w_proj.lora.2": 32}),
        **vectors(w_proj__lora__2__bias=32),
        "bonus": (4, 8),
        **vectors(g_norm__weight=32, g_norm__bias=32),
        **OUTPUT,
    },
    "rwkv7": {
        **projections(r=32, k=32, v=32),
        **vectors(**{f"x_{name}": 32 for name in "rwkvag"}),
        **maps(**{f"{name}_lora.{i}": 32 for name in "wag" for i in (0, 2)}),
        **vectors(w_lora__2__bias=32, a_lora__2__bias=32, k_k=32, k_a=32),
        "r_k": (4, 8),
        **vectors(g_norm__weight=32, g_norm__bias=32),
        **OUTPUT,
    },
    "gated_delta_product": {
        **GATED_DELTA,
        **projections(k=64, v=128, b=8),
        **convolutions(k=64, v=128),
    },
    "precond_gated_delta_net": {
        **GATED_DELTA,
        **projections(a_atk=4, b_atk=4),
        **vectors(A_log_atk=4, dt_bias_atk=4, log_atk_scale=4),
    },
    "gsa": {**projections(q=32, k=16, v=16, f=6), **vectors(g_norm__weight=32), **OUTPUT},
    "retention": {
        **projections(q=32, k=32, v=64, g=64),
        **vectors(g_norm_swish_gate__weight=16),
        "o_proj.weight": (32, 64),
    },
    "path": {
        **projections(q=32, k=32, v=32, bt=4, g=4),
        **maps(**{"w_proj.0": 32, "w_proj.1": 32}),
        "w_conv1d.weight": (32, 1, 3),
        **vectors(bt_proj__bias=4, g_proj__bias=4),
        **OUTPUT,
    },
}
"""The shapes of the weights of each layer, by its name."""


def linear(w, name, x, heads=None):
    y = torch.nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
    return y if heads is None else y.unflatten(-1, (heads, -1))


def low_rank(w, name, x, heads=None):
    return linear(w, f"{name}.1", linear(w, f"{name}.0", x), heads)


def short_convolution(w, name, x):
    """`ShortConvolution`: causal, depthwise, followed by SiLU."""
    weight = w[f"{name}.weight"]
    channels, size = weight.shape[0], weight.shape[-1]
    padded = pad(x.mT, (size - 1, 0))
    return silu(conv1d(padded, weight, groups=channels)).mT


def convolved(w, x, names="qkv", shape=(HEADS, -1)):
    """The projections of these names, with short convolutions."""
    for name in names:
        y = short_convolution(w, f"{name}_conv1d", linear(w, f"{name}_proj", x))
        yield y.unflatten(-1, shape)


def decay(w, x, name="a", suffix=""):
    step = softplus(linear(w, f"{name}_proj", x) + w[f"dt_bias{suffix}"])
    return -w[f"A_log{suffix}"].exp() * step


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def normed(w, name, o):
    return o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]


def gated(w, x, o, norm="o_norm", activation=silu):
    """The output of a layer whose last projection has a gate."""
    o = normed(w, norm, o) * activation(linear(w, "g_proj", x, HEADS))
    return linear(w, "o_proj", o.flatten(2))


def decayed_by_channels(w, x, operator, *strengths):
    q, k, v = convolved(w, x)
    score = low_rank(w, "f_proj", x) + w["dt_bias"]
    g = -w["A_log"].exp()[:, None] * softplus(score).unflatten(-1, (HEADS, -1))
    o, _ = operator(unit(q), unit(k), v, g, *strengths)
    o = normed(w, "o_norm", o) * low_rank(w, "g_proj", x, HEADS).sigmoid()
    return linear(w, "o_proj", o.flatten(2))


def normed_heads(w, o, x):
    """The norm of each head of an operator's output (b, h, t, d)."""
    o = o.transpose(1, 2).flatten(0, 1).flatten(1)
    o = group_norm(o, HEADS, w["g_norm.weight"], w["g_norm.bias"], eps=8e-5)
    return o.unflatten(0, x.shape[:2])


def rotary(x):
    """Pairs are half a head apart."""
    half = x.shape[-1] // 2
    frequency = 10_000 ** (-torch.arange(half) / half)
    angle = (torch.arange(x.shape[1])[:, None] * frequency)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def gla(w, x):
    q = linear(w, "q_proj", x, HEADS)
    k, v = (linear(w, f"{n}_proj", x, 2).repeat_interleave(2, 2) for n in "kv")
    gate = logsigmoid(low_rank(w, "gk_proj", x, 2).repeat_interleave(2, 2)) / 16
    o, _ = references("gla").naive_recurrent_gla(q, k, v, gate)
    return gated(w, x, o, "g_norm_swish_gate")


def delta_net(w, x):
    q, k, v = convolved(w, x)
    beta = linear(w, "b_proj", x).sigmoid()
    g = decay(w, x) if "A_log" in w else torch.zeros_like(beta)
    rule = references("gated_delta_rule").naive_recurrent_gated_delta_rule
    o, _ = rule(unit(q), unit(k), v, beta, g)
    if "g_proj.weight" in w:
        return gated(w, x, o)
    return linear(w, "o_proj", normed(w, "o_norm", o).flatten(2))


def gated_delta_net(w, x):
    return delta_net(w, x)


def kda(w, x):
    beta = linear(w, "b_proj", x).sigmoid()
    return decayed_by_channels(w, x, references("kda").naive_recurrent_kda, beta)


def gdn2(w, x):
    strengths = (linear(w, f"{n}_proj", x, HEADS).sigmoid() for n in "bw")
    return decayed_by_channels(w, x, references("gdn2").naive_recurrent_gdn2, *strengths)


def comba(w, x):
    """Comba's layer with its chunked operator, whose result is that of the layer's kernels."""
    q, k, v = convolved(w, x)
    p = k * w["decay"][:, None].sigmoid()
    q = q - w["D"][:, None] * p
    beta = linear(w, "b_proj", x).sigmoid()
    operator = references("comba").naive_chunk_comba
    o, _ = operator(unit(q), unit(k), v, unit(p), decay(w, x), beta, chunk_size=16)
    return gated(w, x, o, activation=torch.sigmoid)


def mesa_net(w, x):
    q, k = convolved(w, x, "qk")
    o, *_ = references("mesa_net").naive_mesa_net_exact(
        q=unit(q),
        k=unit(k),
        v=linear(w, "v_proj", x, HEADS),
        g=logsigmoid(linear(w, "a_proj", x)),
        lamb=softplus(w["lambda_params"]).unflatten(0, (HEADS, -1)) + 0.25,
        beta=linear(w, "b_proj", x).sigmoid(),
    )
    return linear(w, "o_proj", normed(w, "o_norm", o).flatten(2))


def hgrn2(w, x):
    q, f, v = (linear(w, f"{name}_proj", x, HEADS) for name in "qfi")
    bound = torch.tensor(0.25)
    g = torch.logaddexp(bound.log(), torch.log1p(-bound) + logsigmoid(f))
    o, _ = references("gla").naive_recurrent_gla(silu(q), 1 - g.exp(), v, g)
    return linear(w, "o_proj", normed(w, "g_norm", o.flatten(2)))


def rwkv6(w, x):
    delta = pad(x, (0, 0, 1, -1)) - x
    mixed = {}
    for name, bias in zip("rwkvg", w["x_bias"], strict=True):
        first = linear(w, f"x_proj.0.{name}.linear", x + delta * w[f"x_proj.0.{name}.mu"])
        mix = linear(w, f"x_proj.2.{name}", first.tanh()) + bias
        mixed[name] = x + delta * mix
    r, k, v = (linear(w, f"{n}_proj", mixed[n], HEADS) for n in "rkv")
    g = -linear(w, "w_proj.lora.2", linear(w, "w_proj.lora.0", mixed["w"]).tanh()).exp()
    arrays = (r, k, v, g.unflatten(-1, (HEADS, -1)))
    operator = references("rwkv6", "recurrent_naive").naive_recurrent_rwkv6
    o, _ = operator(*(array.transpose(1, 2) for array in arrays), w["bonus"], scale=1.0)
    gate = silu(linear(w, "g_proj", mixed["g"]))
    return linear(w, "o_proj", normed_heads(w, o, x) * gate)


def rwkv7(w, x):
    before = pad(x, (0, 0, 1, -1)) - x
    rows = {name: x + before * w[f"x_{name}"] for name in "rwkvag"}

    def lora(name, activation):
        hidden = activation(linear(w, f"{name}_lora.0", rows[name]))
        return linear(w, f"{name}_lora.2", hidden)

    r, k, v = (linear(w, f"{n}_proj", rows[n]) for n in "rkv")
    gate = lora("g", torch.sigmoid)
    g = -0.6065306597126334 * lora("w", torch.tanh).sigmoid()
    rate = lora("a", lambda hidden: hidden).sigmoid()
    kappa = unit((k * w["k_k"]).unflatten(-1, (HEADS, -1)))
    k = k + k * (rate - 1) * w["k_a"]
    r, k, v, g, rate = (y.unflatten(-1, (HEADS, -1)) for y in (r, k, v, g, rate))
    arrays = (r * 8**0.5, k, v, -kappa, kappa * rate, g)  # The operator has no option scale.
    operator = references("generalized_delta_rule/dplr").dplr_recurrence
    o, _ = operator(*(array.transpose(1, 2) for array in arrays))
    bonus = (r * k * w["r_k"]).sum(-1, keepdim=True) * v
    return linear(w, "o_proj", (normed_heads(w, o, x) + bonus.flatten(2)) * gate)


def gated_delta_product(w, x):
    (q,) = convolved(w, x, "q")
    # The n steps, part of the width, become consecutive tokens.
    k, v = (y.flatten(1, 2) for y in convolved(w, x, "kv", (2, HEADS, -1)))
    beta = linear(w, "b_proj", x).sigmoid().unflatten(-1, (2, HEADS)).flatten(1, 2)
    operator = references("gated_delta_product").naive_recurrent_gated_delta_product
    scale, g = q.shape[-1] ** -0.5, decay(w, x)
    o, _ = operator(unit(q), unit(k), v, g, beta, scale, num_householder=2)
    return gated(w, x, o)


def precond_gated_delta_net(w, x):
    """The operator normalises q and k itself, without ε."""
    o, _, _ = references("precond_gated_delta_rule").naive_recurrent_precond_gated_delta_rule(
        *convolved(w, x),
        g_atk=decay(w, x, "a_atk", "_atk"),
        g=decay(w, x),
        beta_atk=linear(w, "b_atk_proj", x).sigmoid(),
        beta=linear(w, "b_proj", x).sigmoid(),
        log_atk_scale=w["log_atk_scale"],
    )
    return gated(w, x, o)


def gsa(w, x):
    q = silu(linear(w, "q_proj", x, HEADS))
    k, v = (silu(linear(w, f"{n}_proj", x, 2)) for n in "kv")
    f = logsigmoid(linear(w, "f_proj", x, 2)) / 8
    k, v, f, s = (y.repeat_interleave(2, 2) for y in (k, v, f, 1 - f.exp()))
    o, _ = references("gsa").naive_recurrent_gsa(q, k, v, s, f, scale=1.0)
    return linear(w, "o_proj", normed(w, "g_norm", silu(o.flatten(2))))


def retention(w, x):
    q, k, v = (linear(w, f"{n}_proj", x, HEADS) for n in "qkv")
    # The heads of `naive_retention` are before time.
    arrays = (y.transpose(1, 2) for y in (rotary(q), rotary(k), v))
    o = references("retention").naive_retention(*arrays).transpose(1, 2)
    return gated(w, x, o, "g_norm_swish_gate")


def path(w, x):
    q, k, v = (linear(w, f"{n}_proj", x, HEADS) for n in "qkv")
    directions = short_convolution(w, "w_conv1d", low_rank(w, "w_proj", x))
    directions = unit(directions.unflatten(-1, (HEADS, -1)))
    beta = 2 * linear(w, "bt_proj", x).sigmoid()
    g = logsigmoid(linear(w, "g_proj", x))
    rule = references("path_attn").naive_path_attn
    o = rule(q, k, v, directions, beta, g, scale=8**-0.5, chunk_size=4)
    return linear(w, "o_proj", o.flatten(2))
