"""Random inputs of any mechanism, with keys that are hard to tell apart or to normalise."""

import numpy as np
from hypothesis import strategies as st

from precondattn_conformance.inputs import numbers_in_range

KEYS = ("random", "clustered", "duplicate", "zero", "tiny", "opposite")


def keys_of(rng, kind, shape):
    """Keys (b, s, n, d)."""
    k, centre = rng.normal(size=shape), rng.normal(size=(shape[0], 1, *shape[2:]))
    chosen = rng.integers(2, size=shape[1])
    match kind:
        case "clustered":
            return centre + 1e-3 * k
        case "duplicate":
            return k[:, chosen % shape[1]]
        case "zero":
            return k * chosen[:, None, None]
        case "tiny":
            return 1e-4 * k
        case "equal":
            return centre + 0 * k
        case "opposite":
            return centre * (2 * chosen - 1)[:, None, None]
        case "growing" | "shrinking":  # Scores s‖k‖² from 0.1 to 250.
            squares = np.sort(np.exp(rng.uniform(-2, 5.5, size=(*shape[:3], 1))), axis=1)
            squares = squares if kind == "growing" else squares[:, ::-1]
            return k * np.sqrt(squares * shape[-1] ** 0.5 / np.sum(k * k, axis=-1, keepdims=True))
    return k


class Problem:
    """Random q, k, v of any sizes, and by `x` whatever else a mechanism declares."""

    def __init__(
        self, seed=0, kind="random", *, s=6, t=None, n=1, group=1, values=1, d=3, e=2, b=2, spread=1
    ):
        self.rng, self.group = np.random.default_rng(seed), group
        self.sizes = {"b": b, "s": s, "t": t or s, "n": n, "h": n * group, "d": d, "e": e, "m": 4}
        self.sizes["u"] = n * group * values
        self.q = spread * self.rng.normal(size=self.shape("bthd"))
        self.k = keys_of(self.rng, kind, self.shape("bsnd"))
        self.v = self.rng.normal(size=self.shape("bsne"))

    def shape(self, letters):
        return tuple(self.sizes[letter] for letter in letters)

    def x(self, m, **given):
        """All inputs of a mechanism, by name."""
        known = {name: getattr(self, name) for name in "qkv"} | given
        x = {}
        for name, pattern in m.inputs.items():
            shape, x[name] = pattern.shape(self.sizes), known.get(name)
            if x[name] is None or (name not in given and x[name].shape != shape):
                x[name] = numbers_in_range(self.rng, pattern, shape)
            elif pattern.unit and name not in given:
                size = np.linalg.vector_norm(x[name], axis=-1, keepdims=True)
                x[name] = x[name] / np.where(size > 0, size, 1)
        return x

    def like(self, array):
        return self.rng.normal(size=array.shape)

    def like_output(self):
        return self.rng.normal(size=self.shape("bthe"))

    def states(self, cache):
        """States that are not zero; a sum of positive keys is positive."""
        arrays = {name: self.like(array) for name, array in cache.store.items()}
        return {name: np.abs(a) if a.ndim == 3 else a for name, a in arrays.items()}


@st.composite
def problems(draw, kinds=("random",), longest=9, square=False, grouped=True, spreads=(1,)):
    s = draw(st.integers(1, longest))
    return Problem(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from(kinds)),
        s=s,
        t=s if square else draw(st.integers(1, s)),
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)) if grouped else 1,
        d=draw(st.integers(1, 5)),
        spread=draw(st.sampled_from(spreads)),
    )
