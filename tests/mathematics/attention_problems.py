"""Random queries, keys and values with a mask, for identities of softmax attention and LASER."""

import numpy as np
from hypothesis import strategies as st

import precondattn as pa


class AttentionProblem:
    """Random q, k, v of some sizes, a bias, and the mask of a causal or windowed base."""

    def __init__(
        self, rng, *, t, s, n=1, group=1, causal=True, window=None, spread=1.0, height=1.0, b=2
    ):
        self.rng, self.group = rng, group
        self.base = pa.Softmax(causal=causal, window=window)
        self.biased_base = pa.Softmax(causal=causal, window=window, bias=True)
        self.q = spread * rng.normal(size=(b, t, n * group, 3))
        self.k = rng.normal(size=(b, s, n, 3))
        self.v = height * rng.normal(size=(b, s, n, 2))
        self.bias = rng.normal(size=(b, n * group, t, s))
        # The last query has the position of the last key.
        distance = np.arange(t)[:, None] + s - t - np.arange(s)
        self.visible = np.ones((t, s), dtype=bool)
        if causal:
            self.visible &= distance >= 0
        if window is not None:
            self.visible &= distance < window

    def like_output(self):
        return self.rng.normal(size=(*self.q.shape[:3], self.v.shape[-1]))


@st.composite
def attention_problems(
    draw,
    of=AttentionProblem,
    causal=None,
    square=False,
    windows=True,
    spreads=(1.0,),
    heights=(1.0,),
):
    """Problems of the class `of`, with queries and values of the given sizes."""
    s = draw(st.integers(1, 9))
    causal = draw(st.booleans()) if causal is None else causal
    return of(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        t=s if square else draw(st.integers(1, s)),
        s=s,
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        causal=causal,
        window=draw(st.none() | st.integers(1, s)) if causal and windows else None,
        spread=draw(st.sampled_from(spreads)),
        height=draw(st.sampled_from(heights)),
    )


def logits(q, k, bias=None, scale=None):
    """scale · q kᵀ + bias of shape (b, h, t, s), without masks; the scale is 1/√d by default."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = scale * np.einsum("bthd,bshd->bhts", q, k)
    return products if bias is None else products + bias
