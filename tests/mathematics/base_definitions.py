"""The definitions of all mechanisms without a base, for one sequence, as loops over its tokens.

They share no code with the library. Arrays have no batch axis, and masked tokens are taken out:
`KeptTokens` has the positions of queries and keys that are left. Any array may be complex,
because `definitions.py` differentiates by complex steps, f(x + iε d)/ε. So absolute values and
comparisons are those of real parts.
"""

from typing import NamedTuple

import numpy as np


class KeptTokens(NamedTuple):
    """Positions of queries (t,) and of keys (s,), in order, of `count` tokens."""

    q: np.ndarray
    k: np.ndarray
    count: int

    @property
    def distance(self):
        """How many tokens each query is behind each key, (t, s)."""
        return self.q[:, None] - self.k

    @property
    def own(self):
        """The indices of the queries that have a key at their position, and of these keys."""
        return np.nonzero(self.distance == 0)


def of_heads(x, heads, axis=1):
    return np.repeat(x, heads // x.shape[axis], axis)


def softmax(scores, visible=True):
    """Weights over the last axis; those of a row without a visible entry are 0."""
    highest = np.max(np.where(visible, scores.real, -np.inf), axis=-1, keepdims=True, initial=-1e9)
    weights = np.where(visible, np.exp(np.where(visible, scores - highest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


# Attention


def path_scores(q, k, w, beta, at):
    """q_iᵀ H_i … H_{j+1} k_j with H = I − β w wᵀ, one reflection after another: (h, t, s)."""
    scores = np.zeros((q.shape[1], len(q), len(k)), dtype=complex)
    for i, place in enumerate(at.q):
        moving = q[i].astype(complex)
        for j in reversed(range(np.sum(at.k <= place))):
            scores[:, i, j] = np.sum(moving * k[j], -1)
            along = np.sum(moving * w[j], -1, keepdims=True)
            moving = moving - beta[j][:, None] * along * w[j]
    return scores


def cyclic_parts(m, count):
    """Swin's shift: for each token, its window after the roll, and its part of the rolled image."""
    grid = m.grid or (count,)
    columns, size, shift = grid[-1], m.size, m.shift
    size = (1, *size) if m.grid is None else size * (3 - len(size))
    shift = (0, *shift) if m.grid is None else shift * (3 - len(shift))
    places, rows = [divmod(i, columns) for i in range(count)], -(-count // columns)
    padded = [-(-n // w) * w for n, w in zip((rows, columns), size, strict=True)]
    parts = []
    for place in places:
        rolled = [(x - s) % n for x, s, n in zip(place, shift, padded, strict=True)]
        window = tuple(x // w for x, w in zip(rolled, size, strict=True))
        part = tuple(x >= n - s for x, s, n in zip(rolled, shift, padded, strict=True))
        parts.append((window, part))
    return places, parts, size


def windows(m, x, at):
    """The mask of pairs in the same part of a window, and table[Δr + w_r − 1, Δc + w_c − 1]."""
    places, parts, size = cyclic_parts(m, at.count)
    visible = np.array([[parts[i] == parts[j] for j in at.k] for i in at.q])
    bias = np.zeros((x["q"].shape[1], *visible.shape), dtype=complex)
    for i, j in zip(*np.nonzero(visible), strict=True) if m.bias else ():
        (r, c), (r2, c2) = places[at.q[i]], places[at.k[j]]
        row = (r - r2 + size[0] - 1) * (2 * size[1] - 1) + c - c2 + size[1] - 1
        bias[:, i, j] = x["bias_table"][row]
    return visible, bias


def bucket(ahead, rows, longest, causal):
    """T5's bucket of one pair, by its formula."""
    count = rows if causal else rows // 2
    n = max(-ahead, 0) if causal else abs(ahead)
    first, exact = count if not causal and ahead > 0 else 0, count // 2
    if n < exact:
        return first + n
    share = np.log(n / exact) / np.log(longest / exact)
    return first + min(exact + int(np.floor(share * (count - exact) + 1e-9)), count - 1)


def visible_pairs(m, x, at):
    if m.name == "windowed":
        return windows(m, x, at)[0]
    causal = getattr(m, "causal", True)
    seen = at.distance >= 0 if causal else np.ones_like(at.distance, dtype=bool)
    return seen if m.window is None else seen & (np.abs(at.distance) < m.window)


def scores_of(m, x, at):
    """(h, t, s), with all that is added to the scaled products."""
    q, h = x["q"], x["q"].shape[1]
    scale = q.shape[-1] ** -0.5 if m.scale is None else m.scale
    if m.name == "path":
        products = path_scores(q, *(of_heads(x[name], h) for name in ("k", "w", "beta")), at)
    else:
        products = np.einsum("thd,shd->hts", q, of_heads(x["k"], h))
    scores = scale * products
    if getattr(m, "softcap", None) is not None:
        scores = m.softcap * np.tanh(scores / m.softcap)
    if "bias" in x:
        scores = scores + x["bias"]
    if "slopes" in x:
        scores = scores - x["slopes"][:, None, None] * np.abs(at.distance)
    if "bucket_table" in x:
        options = m.buckets, m.max_distance, m.causal
        rows = np.vectorize(lambda behind: bucket(-behind, *options), otypes=[int])(at.distance)
        scores = scores + np.moveaxis(x["bucket_table"][rows], 2, 0)
    if m.name == "windowed":
        scores = scores + windows(m, x, at)[1]
    if getattr(m, "forget", "none") != "none":
        later = (at.k[None, :] > at.k[:, None])[None] & (at.k <= at.q[:, None])[:, None]
        gates = np.einsum("ijl,lh->hij", later, x["g"])
        scores = scores + (scale if m.forget == "scaled" else 1) * gates
    return scores


def attention(m, x, at):
    """A v, or log(A eᵛ) where laser is around it."""
    scores, visible = scores_of(m, x, at), visible_pairs(m, x, at)
    v = of_heads(x["v"], len(scores)).swapaxes(0, 1)
    if "sink" in x:
        column = np.broadcast_to(x["sink"][:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=-1)
        visible = np.concatenate([visible, np.ones((len(visible), 1), bool)], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], axis=1)
    if not x.get("log_of_mean"):
        return (softmax(scores, visible) @ v).swapaxes(0, 1)
    blind = ~visible.any(-1)
    joint = np.where(visible[..., None], scores[..., None] + v[:, None], -np.inf)
    highest = np.where(blind[:, None], 0, joint.real.max(-2, initial=-np.inf))
    top = np.where(blind, 0, np.where(visible, scores.real, -np.inf).max(-1, initial=-np.inf))
    terms = np.where(visible[..., None], np.exp(joint - highest[:, :, None]), 0).sum(-2)
    total = np.where(visible, np.exp(np.where(visible, scores - top[..., None], 0)), 0).sum(-1)
    terms, total = terms + blind[:, None], total + blind
    return (highest + np.log(terms) - (top + np.log(total))[..., None]).swapaxes(0, 1)


def deltaformer(m, x, at):
    """u_t = v_t − β_t Σ_{j<t} P_tj u_j, and o = softmax(s q kᵀ) u."""
    q, h = x["q"], x["q"].shape[1]
    scale = q.shape[-1] ** -0.5 if m.scale is None else m.scale
    k, u = of_heads(x["k"], h), of_heads(x["v"], h).astype(complex)
    out = np.zeros(u.shape, dtype=complex)
    for t in range(len(u)):
        scores = scale * np.einsum("hd,shd->hs", q[t], k[: t + 1])
        if t:
            known = np.einsum("hs,she->he", softmax(scores[:, :t]), u[:t])
            u[t] = u[t] - x["beta"][t][:, None] * known
        out[t] = np.einsum("hs,she->he", softmax(scores), u[: t + 1])
    return out


# Recurrences


def retained(heads):
    return 1 - 2.0 ** (-5 - np.arange(heads))


def outer(a, b):
    return a[..., :, None] * b[..., None, :]


def read_along(state, a):
    """Sᵀ a of each head."""
    return np.einsum("hde,hd->he", state, a)


def written(m, token, states):
    """The states with one more token; the delta rules are those after the match."""
    k, v, g, first = token["k"], token["v"], token.get("g"), states["state"]
    match m.name:
        case "linear":
            return {"state": first + outer(k, v)} | (
                {"mass": states["mass"] + k} if m.normalize else {}
            )
        case "retention":
            return {"state": retained(len(k))[:, None, None] * first + outer(k, v)}
        case "ssd":
            return {"state": np.exp(g)[:, None, None] * first + outer(k, v)}
        case "gla" | "rwkv6" | "hgrn2":
            return {"state": np.exp(g)[..., None] * first + outer(k, v)}
        case "dplr":
            moved = outer(token["b"], read_along(first, token["a"]))
            return {"state": np.exp(g)[..., None] * first + moved + outer(k, v)}
        case "mlstm":
            kept, new = g + states["maximum"], token["i"]
            maximum = np.where(kept.real >= new.real, kept, new)
            kept, new = np.exp(kept - maximum), np.exp(new - maximum)
            matrix = kept[:, None, None] * first + new[:, None, None] * outer(k, v)
            mass = kept[:, None] * states["mass"] + new[:, None] * k
            return {"state": matrix, "mass": mass, "maximum": maximum}
    erased = token.get("p", token.get("erase", k))
    decayed = first
    if g is not None:
        decayed = np.exp(g if g.ndim == 2 else g[:, None])[..., None] * first
    if "w" in token:
        return {
            "state": decayed + outer(k, token["w"] * v - read_along(decayed, token["b"] * erased))
        }
    before = first if getattr(m, "erases", None) == "undecayed" else decayed
    error = v - read_along(before, erased)
    return {"state": decayed + outer(k, token["beta"][:, None] * error)}


def read_state(m, q, states):
    scale = q.shape[-1] ** -0.5 if m.scale is None else m.scale
    result = scale * read_along(states["state"], q)
    if m.name == "mlstm":
        total = scale * np.sum(states["mass"] * q, -1)
        total, least = np.where(total.real < 0, -total, total), np.exp(-states["maximum"])
        return result / (np.where(total.real >= least.real, total, least) + m.eps)[:, None]
    if "mass" in states:
        total = scale * np.sum(states["mass"] * q, -1) + m.eps
        return result / np.where(total == 0, 1, total)[:, None]
    return result


def slots(m, x, at, memory):
    """Gated slots: the softmax over slots of a first read is the query of a second one."""
    h, scale = x["q"].shape[1], x["q"].shape[-1] ** -0.5 if m.scale is None else m.scale
    k, v, s, g = (of_heads(x[name], h) for name in "kvsg")
    keys, values = (
        of_heads(memory.get(n, 0 * outer(a[0], b[0])), h, 0)
        for n, a, b in (
            ("keys", of_or_one(k), of_or_one(s)),
            ("values", of_or_one(s), of_or_one(v)),
        )
    )
    out = []
    for i, j in in_order(at):
        if j is not None:
            keys = np.exp(g[j])[:, None] * keys + outer(k[j], s[j])
            values = np.exp(g[j])[..., None] * values + outer(s[j], v[j])
        if i is not None:
            out.append(read_along(values, softmax(scale * read_along(keys, x["q"][i]))))
    keep_last(memory, {"keys": keys, "values": values})
    return np.stack(out)


def of_or_one(a):
    """The rows of an array, or one row of zeros, for the shapes of a state."""
    return a if len(a) else np.zeros((1, *a.shape[1:]))


def in_order(at):
    """The indices (i, j) of the query and the key of each position, None where there is none."""
    q, k = ({place: i for i, place in enumerate(places)} for places in (at.q, at.k))
    return [(q.get(place), k.get(place)) for place in sorted({*q, *k})]


def keep_last(memory, states):
    """Keep one state of each group of heads, if the memory had that state before."""
    for name in memory.keys() & states.keys():
        memory[name] = states[name][:: len(states[name]) // len(memory[name])]


def recurrence(m, x, at, memory):
    """o_t = s S_tᵀ q_t, token by token; RWKV-6 reads the state before a token, and its bonus."""
    if m.name == "gsa":
        return slots(m, x, at, memory)
    x = dict(x) | ({"k": 1 - np.exp(x["g"])} if m.name == "hgrn2" else {})
    several = m.name == "delta_product"
    q, v = x["q"], x["v"]
    heads = max(q.shape[1], v.shape[2 if several else 1])
    timed = {}
    for name in ("k", "v", "g", "beta", "p", "erase", "a", "b", "w", "i"):
        if name in x:
            timed[name] = of_heads(x[name], heads, 2 if several and name != "g" else 1)
    d, e = timed["k"].shape[-1], v.shape[-1]
    zeros = {"state": np.zeros((heads, d, e))}
    if m.name == "mlstm":
        zeros |= {"mass": np.zeros((heads, d)), "maximum": np.full(heads, -np.inf)}
    elif getattr(m, "normalize", False):
        zeros["mass"] = np.zeros((heads, d))
    states = {name: of_heads(memory.get(name, zero), heads, 0) for name, zero in zeros.items()}
    q, out = of_heads(q, heads), []
    for i, j in in_order(at):
        token = {} if j is None else {name: a[j] for name, a in timed.items()}
        if i is not None and m.name == "rwkv6":
            read = read_state(m, q[i], states)
            if token:
                scale = d**-0.5 if m.scale is None else m.scale
                own = np.sum(q[i] * of_heads(x["u"], heads, 0) * token["k"], -1, keepdims=True)
                read = read + scale * own * token["v"]
            out.append(read)
        if several and token:
            for step in range(m.steps):
                one = {name: token[name][step] for name in ("k", "v", "beta")}
                states = written(m, one | ({"g": token["g"]} if step == 0 else {}), states)
        elif token:
            states = written(m, token, states)
        if i is not None and m.name != "rwkv6":
            out.append(read_state(m, q[i], states))
    keep_last(memory, states)
    return np.stack(out)


# Whole sequences


def between_channels(m, x, at):
    """softmax(s qᵀ k) v over channels; tokens whose key is masked are not there."""
    rows, _ = at.own
    q, h = x["q"][rows], x["q"].shape[1]
    k, v = of_heads(x["k"], h), of_heads(x["v"], h)
    out = np.zeros((len(at.q), h, v.shape[-1]), dtype=complex)
    if m.name == "cross_covariance":
        q, k = (a / np.sqrt((a * a).sum(0, keepdims=True) + m.eps) for a in (q, k))
        scale = x["logit_scale"][:, None, None]
    else:
        by_tokens = max(len(k), 1) if m.scale_by == "tokens" else q.shape[-1]
        scale = by_tokens**-0.5 if m.scale is None else m.scale
    weights = softmax(scale * np.einsum("thc,thd->hcd", q, k))
    out[rows] = np.einsum("hcd,thd->thc", weights, v)
    return out


def means_of_segments(rows, places, count, m):
    """The means of the non-empty segments ⌊i m / L⌋."""
    segments = places * m // count
    return np.stack([rows[segments == j].mean(0) for j in sorted(set(segments))])


def pseudo_inverse(a, iterations, largest=None):
    columns, one = a.sum(0), np.eye(len(a))
    z = a.T / (columns[np.argmax(columns.real)] if largest is None else largest)
    for _ in range(iterations):
        y = a @ z
        z = 0.25 * z @ (13 * one - y @ (15 * one - y @ (7 * one - y)))
    return z


def nystrom(m, x, at, largest=None):
    """Three kernels through means of segments; rows i of `skip` are a convolution of values."""
    h, scale = x["q"].shape[1], x["q"].shape[-1] ** -0.5 if m.scale is None else m.scale
    k, v = of_heads(x["k"], h), of_heads(x["v"], h)
    out = np.zeros((len(at.q), h, v.shape[-1]), dtype=complex)
    for head in range(h) if len(k) else ():
        q, keys = x["q"][:, head], k[:, head]
        q_mean = means_of_segments(q, at.q - at.q[0], len(at.q), m.landmarks)
        k_mean = means_of_segments(keys, at.k, at.count, m.landmarks)
        f, a, r = (
            softmax(scale * a @ b.T) for a, b in ((q, k_mean), (q_mean, k_mean), (q_mean, keys))
        )
        out[:, head] = f @ pseudo_inverse(a, m.iterations, largest) @ (r @ v[:, head])
    if "skip" in x:
        taps = x["skip"].shape[1]
        for tap in range(taps):
            for i, j in zip(*np.nonzero(at.distance == taps // 2 - tap), strict=True):
                out[i] += x["skip"][:, tap, None] * v[j]
    return out


def outlook(m, x, at):
    """Window by window of a grid; a cell's logits are the mean of those of its tokens."""
    grid = m.grid or (at.count,)
    columns = grid[-1]
    rows = -(-at.count // columns)
    size, stride = ((1, *a) if m.grid is None else a * (3 - len(a)) for a in (m.size, m.stride))
    h, v = x["logits"].shape[1], x["v"]
    v = of_heads(v, h)
    scale = v.shape[-1] ** -0.5 if m.scale is None else m.scale
    places = {divmod(int(place), columns): j for j, place in enumerate(at.k)}
    queries = {divmod(int(place), columns): i for i, place in enumerate(at.q)}
    out = np.zeros((len(at.q), h, v.shape[-1]), dtype=complex)
    for r, c in np.ndindex(-(-rows // stride[0]), -(-columns // stride[1])):
        r, c = r * stride[0], c * stride[1]
        cell = [(r + i, c + j) for i, j in np.ndindex(*stride) if (r + i, c + j) in places]
        if not cell:
            continue
        weights = softmax(scale * np.mean([x["logits"][queries[p]] for p in cell], axis=0))
        around = [(r + i - size[0] // 2, c + j - size[1] // 2) for i, j in np.ndindex(*size)]
        slots = [(n, place) for n, place in enumerate(around) if place in places]
        for to, receiver in slots:
            for of, giver in slots:
                out[queries[receiver]] += weights[:, to, of, None] * v[places[giver]]
    return out


def output_of_base(m, x, at, memory):
    match m.name:
        case "softmax" | "path" | "windowed":
            return attention(m, x, at)
        case "deltaformer":
            return deltaformer(m, x, at)
        case "channel" | "cross_covariance":
            return between_channels(m, x, at)
        case "nystrom":
            return nystrom(m, x, at)
        case "outlook":
            return outlook(m, x, at)
    return recurrence(m, x, at, memory)
