"""Random inputs that compress and meet the ends of every range, and the entries of one case."""

from pathlib import Path

import numpy as np

# torch is imported where it is used: pytest imports this file to collect the tests.

RESULTS = Path(__file__).with_name("results.npz")


def saved_entries(name):
    """The entries of a peer, as `make_fixtures.py` saved them."""
    with np.load(RESULTS) as entries:
        chosen = [entry for entry in entries if entry.startswith(f"{name}/")]
        return {entry.removeprefix(f"{name}/"): entries[entry] for entry in chosen}


def clustered(rng, shape, clusters=4, spread=0.4):
    """Return normal vectors (batch, time, ...) around a few centres, which the times share."""
    centres = rng.normal(size=(clusters, *shape[2:]))
    return centres[rng.integers(clusters, size=shape[:2])] + spread * rng.normal(size=shape)


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


KINDS = {
    "normal": normal,
    "positive": lambda rng, *shape: np.abs(normal(rng, *shape)),
    "keys": keys_of,
    "unit": lambda rng, *shape: keys_of(rng, *shape, unit=True),
    "gates": gates_of,
    "betas": betas_of,
    "halves": lambda rng, *shape: betas_of(rng, *shape) / 2,
    "slots": lambda rng, *shape: sixteenths(rng.uniform(size=shape)),
}


def drawn(rng, sizes, words):
    """Return arrays by name; a word is a name, a kind and letters of the axes: q:normal:bthd."""
    parts = (word.split(":") for word in words.split())
    return {name: KINDS[kind](rng, *(sizes[a] for a in axes)) for name, kind, axes in parts}


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
