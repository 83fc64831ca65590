"""The inputs of a case, generated from the declarations: NumPy arrays in float64.

On i.i.d. random keys LUCID is nearly softmax, which hides most bugs. So there are kinds of keys:

===========  ========================================================================
random       i.i.d. normal
clustered    a few directions, with a little noise: cosines of 0.99 within a cluster
duplicate    three distinct keys, repeated
zero         every third key is zero
real         a trained model's queries, keys and values on English text
===========  ========================================================================
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Arrays
from precondattn_conformance.masks import arguments, masks
from precondattn_conformance.memory_order import constant, expanded_axes

KINDS = ("random", "clustered", "duplicate", "zero", "real")


class CallLayout(NamedTuple):
    """The sizes of a call, and its masks."""

    name: str
    b: int = 2
    t: int = 7
    s: int = 7
    h: int = 4
    n: int = 2
    d: int = 8
    e: int = 6
    m: int = 5
    values_per_head: int = 2
    """Value heads per query head, for mechanisms that allow more value heads."""
    mask: str | None = None
    """The name of a mask in `masks.PATTERNS`, or two names joined by +."""
    broadcast: str = ""
    """The broadcast axes: those of b and h that have size 1 in an additive bias."""
    block: int = 0
    """The size of a block, at whose edges masks begin and the calls of a cache end."""
    order: str = ""
    """The order of arrays in memory (`memory_order.ORDERS`); empty: contiguous."""

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in "btshndem"}
        return {**sizes, "u": self.h * self.values_per_head}

    def has(self, argument: str) -> bool:
        """Whether the call has this mask, by the name of its argument, such as `"lengths"`."""
        return argument in arguments(self.mask)

    def masks(self) -> Arrays:
        """The masks of the call, by name."""
        return masks(self.mask, self.b, self.s, self.h, self.block)


def make_inputs(mechanism: pa.Mechanism, layout: CallLayout, kind: str, seed: int = 0) -> Arrays:
    """The declared inputs of a mechanism, with one kind of keys."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    arrays: Arrays = {}
    for name, pattern in mechanism.inputs.items():
        shape = tuple(
            1 if axis.broadcasts and axis.letter in layout.broadcast else size
            for axis, size in zip(pattern.axes, pattern.shape(layout.sizes), strict=True)
        )
        arrays[name] = numbers_in_range(rng, pattern, shape)
    if kind == "real":
        names = [name for name in ("q", "k", "v") if name in arrays]
        arrays |= {name: real_heads(name, arrays[name].shape, layout) for name in names}
    for q, k in (("q", "k"), ("q2", "k2")):
        if k not in arrays or (kind == "real" and k == "k"):
            continue
        arrays[k] = _keys(rng, arrays[k].shape, kind)
        if kind == "clustered" and q in arrays:
            arrays[q] = _queries_near(rng, arrays[q], arrays[k])
    if "p" in arrays:
        # The part erased along k then never grows, even if a preconditioner rescales k's entries.
        # The features of a map, which may outnumber k's channels, are not negative.
        is_of_keys = arrays["p"].shape == arrays["k"].shape
        arrays["p"] = np.copysign(arrays["p"], arrays["k"] if is_of_keys else 1.0)
    for name, array in arrays.items():
        if mechanism.inputs[name].unit:
            arrays[name] = _unit_or_zero(array)
    for name, array in arrays.items():
        arrays[name] = constant(array, expanded_axes(mechanism, name, layout.order))
    return arrays


def _unit_or_zero(rows: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a row of zeros stays zero."""
    length = np.linalg.vector_norm(rows, axis=-1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)


def numbers_in_range(
    rng: np.random.Generator, pattern: Pattern, shape: tuple[int, ...]
) -> np.ndarray:
    """Random numbers in a declared range, including both ends where the range is closed."""
    low, high = pattern.low, pattern.high
    numbers = np.asarray(rng.normal(size=shape))
    if pattern.unit:
        return _unit_or_zero(numbers)
    if low is None or high is None or (np.isinf(low) and np.isinf(high)):
        return numbers
    if np.isfinite(low) and np.isfinite(high):
        numbers = np.asarray(rng.uniform(low, high, size=shape))
    else:
        distance = np.exp(0.7 * numbers)
        numbers = np.asarray(low + distance if np.isfinite(low) else high - distance)
    # At the ends of a range a formula may divide by zero, or a state may not decay.
    if not pattern.open_low:
        numbers.flat[::5] = low
    if not pattern.open_high:
        numbers.flat[3::7] = high
    return numbers


def _keys(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    b, s, *rest = shape
    keys = rng.normal(size=shape)
    centres = rng.normal(size=(b, 3, *rest))
    cluster = rng.permutation(np.arange(s) % 3)
    if kind == "clustered":
        return centres[:, cluster] + 0.1 * keys
    if kind == "duplicate":
        return centres[:, cluster]
    if kind == "zero":
        keys[:, ::3] = 0
    return keys


def _queries_near(rng: np.random.Generator, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Queries close to keys, as in trained models."""
    t, h = q.shape[1:3]
    k = k[:, :, -1] if k.ndim == 5 else k  # The last of several keys of a token.
    near = np.repeat(k, h // k.shape[2], axis=2)[:, rng.integers(k.shape[1], size=t)]
    return near + 0.3 * q


@lru_cache(maxsize=1)
def _minilm() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    path = files("precondattn_conformance").joinpath("data/minilm.npz")
    with path.open("rb") as file, np.load(file) as arrays:
        q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
        return q, k, v


PLAIN = CallLayout("plain")


def real_heads(name: str, shape: tuple[int, ...], layout: CallLayout) -> np.ndarray:
    """q, k or v of the trained model, sliced to a shape (b, time, heads, width).

    The model has nine heads, three of each of the layers 0, 2 and 5, on 252 tokens. If three are
    requested, they are the first of each layer; if more than nine, heads are repeated.
    """
    if len(shape) == 5:  # Several keys of a token are taken from further heads.
        b, time, steps, heads, width = shape
        return real_heads(name, (b, time, steps * heads, width), layout).reshape(shape)
    array = _minilm()["qkv".index(name)].transpose(1, 0, 2, 3)  # time, layer, head, width
    b, time, heads, width = shape
    if heads == 3:
        array = array[:, :, :1]
    flat = array[layout.s - time : layout.s].reshape(time, -1, width)
    flat = np.repeat(flat, heads // flat.shape[1], axis=1)
    return np.repeat(flat[None], b, axis=0)


def slice_tokens(mechanism: pa.Mechanism, inputs: Arrays, start: int, stop: int) -> Arrays:
    """The inputs of `extend` for tokens start … stop − 1; pairs keep all their key columns."""
    sliced = {}
    for name, pattern in mechanism.inputs.items():
        axis = pattern.time_axis
        index = [slice(None)] * len(pattern.axes)
        if axis is not None:
            index[axis] = slice(start, stop)
        sliced[name] = inputs[name][tuple(index)]
    return sliced
