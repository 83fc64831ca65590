"""The definition of every mechanism, preconditioners included, and its gradient by complex steps.

A preconditioner is read from the outside in, as in `base_definitions`. Masks are taken literally:
every segment of every sequence is computed alone, without its masked keys.
"""

import re

import numpy as np

from tests.mathematics.base_definitions import (
    KeptTokens,
    in_order,
    keep_last,
    of_heads,
    outer,
    output_of_base,
    path_scores,
    retained,
    softmax,
    visible_pairs,
)

STEP = 1e-30


def normed(x, norm, eps, gain=None):
    x = x - x.mean(-1, keepdims=True) if norm == "layer" else x
    square = (x * x).sum(-1, keepdims=True) / (1 if norm == "l2" else x.shape[-1]) + eps
    x = x / np.sqrt(np.where(square == 0, 1, square))
    return x if gain is None else gain * x


def features(m, x, name):
    """The features of queries or keys."""
    y = x[name]
    if m.name == "elu1":
        return np.where(y.real > 0, y + 1, np.exp(np.where(y.real > 0, 0, y)))
    weight, bias = x[f"{name}_weight"], x[f"{name}_bias"]
    y = m.factor * ((weight @ y[..., None])[..., 0] + bias)
    return softmax(np.concatenate([y, -y], axis=-1))


def decay_of(x, keys, heads):
    """The gate (s, heads) of statistics of keys: of a head, of the mean channel, or retention's."""
    if "g" not in x:
        return np.broadcast_to(np.log(retained(heads)), (keys, heads))
    g = x["g"]
    return of_heads(g.mean(-1) if g.ndim == 3 else g, heads)


def conditioned_query(m, x, at, memory):
    """(I − λ Σ) q̄ with Σ the covariance of the keys k̄ so far."""
    h, d = x["q"].shape[1:]
    q, k = normed(x["q"], "l2", m.eps), of_heads(normed(x["k"], "l2", m.eps), h)
    decay = np.exp(decay_of(x, len(k), h) if m.covariance == "decayed" else np.zeros((len(k), h)))
    zeros = {"second_moment": (h, d, d), "first_moment": (h, d), "count": (h,)}
    sums = [of_heads(memory.get(n, np.zeros(shape)), h, 0) for n, shape in zeros.items()]
    second, first, count = sums
    out = np.zeros(q.shape, dtype=complex)
    for i, j in in_order(at):
        if j is not None:
            second = decay[j][:, None, None] * second + outer(k[j], k[j])
            first = decay[j][:, None] * first + k[j]
            count = decay[j] * count + 1
        if i is None:
            continue
        seen = at.k <= at.q[i]
        if m.covariance == "query_weighted":
            p = softmax(np.einsum("hd,shd->hs", q[i], k[seen]) / m.tau)
            centred = k[seen] - np.einsum("hs,shd->hd", p, k[seen])
            sigma = np.einsum("hs,shc,shd->hcd", p, centred, centred)
        else:
            number = np.where(count == 0, 1, count)
            mean = first / number[:, None]
            sigma = second / number[:, None, None] - outer(mean, mean)
        moved = np.einsum("hcd,hd->hc", sigma, q[i])
        out[i] = q[i] - x["contraction"][i][:, None] * moved
    keep_last(memory, dict(zip(zeros, (second, first, count), strict=True)))
    return out


def regressed_query(m, x, at, memory):
    """(H + diag λ)⁻¹ q with H = e^g H + β k kᵀ."""
    heads, d = x["q"].shape[1:]
    k = of_heads(x["k"], heads)
    has_decay = m.decay and ("g" in x or bare(m).name == "retention") and bare(m).name != "gsa"
    decay = np.exp(decay_of(x, len(k), heads) if has_decay else np.zeros((len(k), heads)))
    beta = of_heads(x["beta_mesa"], heads) if m.beta else np.ones((len(k), heads))
    moment = of_heads(memory.get("mesa_moment", np.zeros((heads, d, d))), heads, 0)
    out = np.zeros(x["q"].shape, dtype=complex)
    ridge = np.stack([np.diag(row) for row in x["lam_mesa"]])
    for i, j in in_order(at):
        if j is not None:
            key = beta[j][:, None, None] * outer(k[j], k[j])
            moment = decay[j][:, None, None] * moment + key
        if i is not None:
            out[i] = np.linalg.solve(moment + ridge, x["q"][i][..., None])[..., 0]
    keep_last(memory, {"mesa_moment": moment})
    return out


def gentle_key(m, x, at, memory):
    """bound^(−r / (1 + |r|)) k with r = log(A + ε) − c and A = e^g A + β k ∘ k."""
    k, out = x["k"], np.zeros(x["k"].shape, dtype=complex)
    squares = memory.get("squares", np.zeros(k.shape[1:]))
    center = x["log_atk_scale"][:, None] if m.learned else m.center
    for j in range(len(k)):
        weight = x["beta_atk"][j][:, None]
        squares = np.exp(x["g_atk"][j])[:, None] * squares + weight * k[j] ** 2
        r = np.log(squares + m.eps) - center
        out[j] = k[j] * m.bound ** (-r / (1 + np.where(r.real < 0, -r, r)))
    keep_last(memory, {"squares": squares})
    return out


def stable(m, c):
    """By which factor a strength is multiplied, where the step of the rule is 1 − c along k."""
    if m.rule == "implicit":
        return 1 / (1 + c)
    small = np.abs(c) < 1e-8
    return np.where(small, 1 - c / 2, -np.expm1(-c) / np.where(small, 1, c))


def stable_strengths(m, x):
    k = x["k"]
    if "b" not in x:
        square = of_heads((k * k).sum(-1), x["beta"].shape[1])
        return {"beta": x["beta"] * stable(m, x["beta"] * square)}
    factor = stable(m, (x["b"] * of_heads(k, x["b"].shape[1]) ** 2).sum(-1))[..., None]
    return {"b": factor * x["b"], "w": factor * x["w"]}


def solved_values(m, base, x, at):
    """LUCID's y: E y = v, row by row; E has the mask and the metric of the base."""
    inner, x_inner = base, x
    while hasattr(inner, "base"):  # Keys as the base of the base sees them.
        x_inner = mapped(inner, x_inner, at, {})
        inner = inner.base
    at = KeptTokens(at.k, at.k, at.count)
    k, v = x_inner["k"], x["v"]
    (s, n, d), eps = k.shape, m.eps
    scale = next(a for a in (m.scale, inner.scale, d**-0.5) if a is not None)
    has_unit_diagonal = m.normalize in ("keys", "queries_and_keys")
    keys = normed(k, "rms", eps) if has_unit_diagonal else k
    if "w" in x and m.metric == "base":
        scores = path_scores(keys, keys, x["w"], x["beta"], at)
    else:
        scores = np.einsum("ind,jnd->nij", keys, keys)
    scores, visible = scale * scores, visible_pairs(inner, x_inner, at)
    y = v.astype(complex)
    if not getattr(inner, "causal", True):
        matrix = np.exp(scores - scale * d) * (1 - np.eye(s))
        matrix = matrix + (1 + (1e-3 if m.rho is None else m.rho)) * np.eye(s)
        return np.linalg.solve(matrix, y.swapaxes(0, 1)).swapaxes(0, 1)
    for i, head in np.ndindex(s, n):
        row = scores[head, i]
        shift = scale * d if has_unit_diagonal else 0
        if m.normalize == "rows":
            shift = row[np.argmax(np.where(visible[i], row.real, -np.inf))]
            shift = shift.real if m.detach_max else shift
        weights = np.where(visible[i], np.exp(np.where(visible[i], row - shift, 0)), 0)
        y[i, head] = y[i, head] - weights[:i] @ y[:i, head]
        y[i, head] = y[i, head] / (1 if has_unit_diagonal else weights[i])
        if m.beta:
            y[i, head] = x["lucid_beta"][i, head] * y[i, head]
    return y


def bare(m):
    while hasattr(m, "base"):
        m = m.base
    return m


def mapped(m, x, at, memory):
    """The inputs that the base of a preconditioner of queries, keys or values gets."""
    q, k = x.get("q"), x.get("k")
    match m.name:
        case "temperature":
            tau = x["tau"]
            return x | {"q": q / (tau if tau.ndim == 0 else tau[:, None])}
        case "per_dim_scale":
            factor = np.log(1 + np.exp(x["per_dim"])) / (np.log(2) if m.normalize else 1)
            return x | {"q": q * factor}
        case "qk_norm":
            of = {n: normed(x[n], m.norm, m.eps, x.get(f"{n}_gain")) for n in "qk"}
            return x | of
        case "elu1" | "hedgehog":
            return x | {name: features(m, x, name) for name in "qk"}
        case "ccq":
            conditioned = conditioned_query(m, x, at, memory)
            is_rule = bare(m).name in DELTA_RULES and "stable_step" not in str(m)
            chosen = m.backbone_key.replace("auto", "unit" if is_rule else "raw")
            return x | {"q": conditioned, "k": normed(k, "l2", m.eps) if chosen == "unit" else k}
        case "mesa":
            return x | {"q": regressed_query(m, x, at, memory)}
        case "atk":
            return x | {"k": gentle_key(m, x, at, memory), "erase": k}
        case "stable_step":
            return x | stable_strengths(m, x)
        case "laser":
            return x | {"log_of_mean": True}
        case "lucid":
            y = solved_values(m, m.base, x, at)
            if m.normalize == "queries_and_keys":
                return x | {"v": y} | {n: normed(x[n], "rms", m.eps) for n in "qk"}
            return x | {"v": y}
    return x


DELTA_RULES = ("delta", "gated_delta", "kda", "gdn2", "comba", "delta_product")


def in_both_directions(m, x, at):
    """The base forwards, and backwards without each token itself."""
    times = {n: p.letters[1] for n, p in m.base.inputs.items() if p.letters[:1] == "b"}
    once = output(m.base, x, at, {})
    back = KeptTokens(at.count - 1 - at.q[::-1], at.count - 1 - at.k[::-1], at.count)
    flipped = output(m.base, {n: a[::-1] if n in times else a for n, a in x.items()}, back, {})
    own = np.zeros_like(once)
    for i, j in zip(*at.own, strict=True):
        here = {"t": [i], "s": [j]}
        alone = {n: a[here[times[n]]] if n in times else a for n, a in x.items()}
        own[i] = output(m.base, alone, KeptTokens(at.q[[i]], at.k[[j]], at.count), {})[0]
    parts = once, flipped[::-1] - own
    return sum(parts) if m.combine == "sum" else np.concatenate(parts, axis=-1)


def output(m, x, at, memory):
    """(t, heads, e) of one sequence, which leaves its last states in the memory."""
    match m.name:
        case "differential":
            first = output(m.base, x, at, {})
            second = output(m.base, x | {n: x[f"{n}2"] for n in m.paired}, at, {})
            lam = x["lam"]
            return first - (lam if lam.ndim == 0 else lam[..., None]) * second
        case "row_normalized":
            o = output(m.base, x, at, memory)
            over_tokens = bare(m).name in ("channel", "cross_covariance")
            axis = {"auto": 0 if over_tokens else -1, "channel": 0, "token": -1}[m.axis]
            square = (o * o).sum(axis, keepdims=True)
            size = np.sqrt(np.where(square == 0, 1, square)) * (square != 0)
            size = np.where(size.real > m.eps, size, m.eps or 1)
            return o / (size.real if m.detach else size)
        case "bidirectional":
            return in_both_directions(m, x, at)
    if not hasattr(m, "base"):
        return output_of_base(m, x, at, memory)
    return output(m.base, mapped(m, x, at, memory), at, memory)


def sequences(b, t, s, lengths=None, key_mask=None, segment_ids=None):
    """For each segment of a sequence: its row, indices of its queries and keys, and KeptTokens."""
    lengths = [s] * b if lengths is None else lengths
    ids = np.zeros((b, s), int) if segment_ids is None else segment_ids
    kept = np.ones((b, s), bool) if key_mask is None else key_mask
    for row in range(b):
        for segment in np.unique(ids[row, : lengths[row]]):
            tokens = np.flatnonzero(ids[row, : lengths[row]] == segment)
            queries, keys = tokens[tokens >= s - t], tokens[kept[row, tokens]]
            at = KeptTokens(queries - tokens[0], keys - tokens[0], len(tokens))
            if len(queries):
                yield row, queries - (s - t), keys, at


def definition(m, x, states=None, **masks):
    """The output (b, t, heads, e) of a call, and the last states, by the names of buffers."""
    first = next(name for name in ("q", "logits") if name in x)
    b, t = x[first].shape[:2]
    s = next(a.shape[1] for n, a in x.items() if m.inputs[n].letters[1:2] == "s")
    letters = {name: m.inputs[name].letters for name in x}
    last = {name: a.astype(complex) for name, a in (states or {}).items()}
    short = {name: re.match(r"(?:\w+(?:\[[^]]*\])?\.)?(\w+)", name)[1] for name in last}
    out = None
    for row, queries, keys, at in sequences(b, t, s, **masks):
        if letters[first][1] == "s":  # A masked token has no query either.
            queries, at = keys, at._replace(q=at.k)
        inputs = {}
        for name, array in x.items():
            if letters[name][:1] != "b":
                inputs[name] = array
                continue
            own = array[min(row, len(array) - 1)]
            of = {"t": queries, "s": keys}
            for axis, letter in enumerate(letters[name][1:]):
                if (letter in of and own.shape[axis] > 1) or (letter in of and axis == 0):
                    own = np.take(own, of[letter], axis=axis)
            inputs[name] = own
        memory = {short[name]: a[row] for name, a in last.items()}
        result = output(m, inputs, at, memory)
        for name in last:
            last[name][row] = memory[short[name]]
        if out is None:
            out = np.zeros((b, t, *result.shape[1:]), dtype=complex)
        out[row, queries] = result
    return out, last


def derivative(m, x, name, direction, d_out, states=None, d_last=None, **masks):
    """The derivative of ⟨out, d_out⟩ + ⟨last, d_last⟩ along a direction of one input or state."""
    moved_states = states
    if states is not None and name in states:
        moved_states = states | {name: states[name] + 1j * STEP * direction}
    else:
        x = x | {name: x[name] + 1j * STEP * direction}
    out, last = definition(m, x, moved_states, **masks)
    total = np.sum(out.imag * d_out)
    return (total + sum(np.sum(last[n].imag * d) for n, d in (d_last or {}).items())) / STEP


def close(actual, expected, times=1.0):
    """Equality to 1e-10 of the largest expected number and 1, times what a formula amplifies."""
    assert actual.shape == expected.shape
    size = 1 + np.max(np.abs(expected), initial=0.0)
    assert np.max(np.abs(actual - expected), initial=0.0) <= times * 1e-10 * size


def assert_gradients(m, x, gradients, d_out, states=None, d_last=None, times=1.0, **masks):
    """Equality along a random direction of every input and state, which every entry changes."""
    rng = np.random.default_rng(1)
    for name, gradient in gradients.items():
        direction = rng.normal(size=gradient.shape)
        if "second_moment" in name or "mesa_moment" in name:  # They stay symmetric.
            direction = direction + direction.swapaxes(-1, -2)
        expected = derivative(m, x, name, direction, d_out, states, d_last, **masks)
        terms = gradient * direction
        assert np.all(np.isfinite(gradient)), name
        size = times * (1 + np.abs(terms).sum())
        assert abs(terms.sum() - expected) <= 1e-9 * size, name


def assert_is_defined(m, x, times=1.0, **masks):
    """Output and gradients of a call are those of the definition."""
    out, pullback = m.vjp(**x, **masks)
    close(out, definition(m, x, **masks)[0].real, times)
    d_out = np.random.default_rng(0).normal(size=out.shape)
    gradients = pullback(d_out)
    assert gradients.keys() == x.keys()
    assert_gradients(m, x, gradients, d_out, times=times, **masks)
