"""Calls of kernels, for every backend: a row of a table is compared with the definition in float64.

A row names a leaf, sizes, kinds of inputs and masks. Its test holds that outputs and gradients are
those of the definition, whatever padding contains; their dtypes; the declared residuals; and that
no input is written to.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
EXTREME = (0.0, -1e-6, -20.0, -1e4)
"""Gates that are open, closed, or nearly so."""


class KernelRow(NamedTuple):
    """A call of the kernels of a leaf."""

    leaf: pa.Leaf
    t: int
    given: dict
    masks: dict
    dtype: str
    how: dict


def row(name, leaf, t, dtype="float32", *, masks=None, how=None, **given):
    """A parameter of a test: `given` goes to `problem`, `how` to the `check` of a backend."""
    made = KernelRow(leaf_of(leaf), t, given, masks or {}, dtype, how or {})
    return pytest.param(made, id=f"{leaf}: {name}")


def later(*rows, slow=False):
    """The rows in the second tier, or in none."""
    marks = (pytest.mark.thorough, *(pytest.mark.slow,) * slow)
    return [pytest.param(*each.values, id=each.id, marks=marks) for each in rows]


def leaf_of(expression):
    return pa.parse(expression).program.leaves[0]


def problem(
    leaf,
    t,
    s=None,
    *,
    b=1,
    h=2,
    n=1,
    d=12,
    e=20,
    slots=9,
    keys="random",
    gates="random",
    values="random",
    size=1.0,
    apart=1.0,
):
    """Inputs and a cotangent in float64; `h` are the heads of queries or states."""
    rng = np.random.default_rng(t)
    sizes = {"b": b, "t": t, "s": s or t, "d": d, "e": e, "h": h, "u": h, "n": n, "m": slots}
    if getattr(getattr(leaf, "declares", None), "heads", "n") == "u":
        sizes["h"] = n
    x = {name: rng.normal(size=pattern.shape(sizes)) for name, pattern in leaf.inputs.items()}
    if "k" in x:
        x["k"] = keys_of(leaf, x, keys, rng)
    for name in x:
        if name in ("g", "g_atk"):
            extreme = rng.choice(EXTREME, size=x[name].shape)
            x[name] = extreme if gates == "extreme" else -0.3 * np.abs(x[name])
        elif name in ("beta", "lucid_beta"):
            x[name] = rng.uniform(0, 2, size=x[name].shape)
            x[name][:, ::4], x[name][:, 1::4] = 0, 1
        elif name in ("p", "erase"):
            x[name] = (x["k"] + 0.1 * x[name]) / 2
        elif name in ("b", "w", "beta_atk", "contraction", "s"):
            x[name] = rng.uniform(size=x[name].shape)
    if getattr(leaf, "normalize", None) is True:
        x |= {name: np.abs(x[name]) for name in "qk"}
    if "q" in x:
        x["q"] *= size
    if "v" in x:
        x["v"] = values_of(x["v"], values, rng) * apart
    if "o" in x:
        x["o"][:, 1::4], x["o"][:, 2::4] = 0, x["o"][:, :1]
    return x, rng.normal(size=leaf.program.output.shape(sizes))


def keys_of(leaf, x, kind, rng):
    """Keys, some of which coincide; those of a recurrence have a norm of 1."""
    k = x["k"]
    if kind == "clustered":
        k = 0.3 * k + rng.normal(size=(k.shape[0], 1, *k.shape[2:]))
    if kind == "equal":
        k = np.repeat(k[:, :1], k.shape[1], axis=1)
    if getattr(leaf, "declares", None) is not None or "g_atk" in x:
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    if getattr(leaf, "normalize", None) == "given":
        k = k / np.sqrt(np.mean(k * k, axis=-1, keepdims=True))
    if kind == "zero":
        k[:, ::3] = 0
    return k


def values_of(v, kind, rng):
    """Values; those of segments may be far apart, or only those of some channels be large."""
    height = 100 * (np.arange(v.shape[1]) // 7 % 2)[:, None, None]
    if kind == "lifted":
        return v + 100
    if kind == "lifted by segment":
        return v + 100 + height
    if kind == "channels":
        return v * 1e4 ** rng.normal(size=v.shape[3])
    if kind == "one head":  # The others are close.
        return v * np.where(np.arange(v.shape[2]) == 1, 100, 1)[:, None]
    return v


def frame_of(t, s, b, lengths=None, key_mask=None, segments=None, ids=None):
    """A frame for t queries, which are the last of s tokens.

    `segments` are the lengths of those of each sequence.
    """
    key = np.arange(s)[None]
    k_valid, q_valid = key_mask, None
    if lengths is not None:
        within = key < np.asarray(lengths)[:, None]
        k_valid = within if key_mask is None else within & key_mask
        q_valid = within[:, s - t :]
    if segments is not None:
        ids = np.stack([key[0] // n for n in segments])
    return Frame(
        np.arange(s - t, s)[None],
        key,
        q_valid,
        k_valid,
        None if ids is None else ids[:, s - t :],
        ids,
    )


def filled(array, valid, filler):
    """The array with `filler` at invalid tokens."""
    if valid is None:
        return array
    valid = valid.reshape(*valid.shape, *[1] * (array.ndim - 2))
    return np.where(valid, array, np.asarray(filler, array.dtype))


def wide(array):
    """An array of any library in float64."""
    return np.asarray(array).astype(np.float64)


def error(result, expected, least=0.1):
    """The largest difference, divided by the largest expected number or by at least `least`."""
    result, expected = wide(result), wide(expected)
    assert result.shape == expected.shape
    largest = max(np.abs(expected).max(initial=0), least)
    return np.abs(result - expected).max(initial=0) / largest


class Truth(NamedTuple):
    """A call in a dtype with NaN in its padding, and what the definition gives in float64."""

    x: dict
    cotangent: np.ndarray
    frame: Frame
    out: np.ndarray
    gradients: dict


def truth_of(leaf, x, cotangent, frame, dtype, filler=np.nan):
    kind = DTYPES[dtype]
    sides = {
        name: None
        if pattern.time_axis is None
        else (frame.q_valid if "t" in pattern.letters else frame.k_valid)
        for name, pattern in leaf.inputs.items()
    }
    of_out = frame.q_valid if {"q", "o"} & x.keys() else frame.k_valid
    x, cotangent = {name: a.astype(kind) for name, a in x.items()}, cotangent.astype(kind)
    exact = {name: filled(wide(a), sides[name], 0) for name, a in x.items()}
    out, residuals = leaf.forward(exact, frame)
    out = filled(out, of_out, 0)
    d_exact = filled(wide(cotangent), of_out, 0)
    gradients = leaf.backward(exact, frame, out, residuals, d_exact)
    return Truth(
        {name: filled(a, sides[name], filler) for name, a in x.items()},
        filled(cotangent, of_out, filler),
        frame,
        out,
        {name: filled(gradient, sides[name], 0) for name, gradient in gradients.items()},
    )


def truth_of_row(made):
    x, cotangent = problem(made.leaf, made.t, **made.given)
    b, s = next(a.shape[:2] for name, a in x.items() if name != "q")
    frame = frame_of(made.t, s, b, **made.masks)
    return truth_of(made.leaf, x, cotangent, frame, made.dtype, made.how.get("filler", np.nan))


def check(kernels, leaf, truth, run, dtype, bound, gradient_bound, least=0.1, pads_with_0=True):
    """What `run` gives for the arrays of a truth: an output, residuals and gradients."""
    before = {name: a.tobytes() for name, a in truth.x.items()}
    out, residuals, gradients = run(kernels, leaf, truth)
    specs = {name: ArraySpec(tuple(a.shape), dtype) for name, a in truth.x.items()}
    declared = [tuple(each) for each in kernels.residual_shapes(leaf, specs)]
    assert [(tuple(r.shape), str(r.dtype)) for r in residuals] == declared
    assert str(out.dtype) == dtype
    valid = truth.frame.q_valid if {"q", "o"} & truth.x.keys() else truth.frame.k_valid
    found = wide(out)
    if not pads_with_0 or "q" not in truth.x:  # Outputs of padded tokens may be anything.
        found = filled(found, valid, 0)
    assert error(found, truth.out, least) < bound
    assert set(gradients) == set(truth.gradients)
    for name, gradient in truth.gradients.items():
        assert str(gradients[name].dtype) == dtype
        assert error(gradients[name], gradient, least) < gradient_bound, name
        assert truth.x[name].tobytes() == before[name], name
    return {"out": np.asarray(out), "residuals": residuals} | gradients


def request_of(piece, verb="vjp", library="numpy", dtype="float32", device="cpu", **changes):
    """A request of a piece, of small sizes or of the shapes in `changes`."""
    sizes = {"b": 2, "t": 20, "s": 20, "h": 4, "n": 2, "u": 4, "d": 8, "e": 8, "m": 4}
    if verb == "extend":
        sizes |= {"t": 1, "s": 1}
    sizes |= {name: changes.pop(name) for name in (*changes,) if isinstance(changes[name], int)}
    shapes = {name: pattern.shape(sizes) for name, pattern in piece.inputs.items()} | changes
    return Request(verb, library, device, dtype, tuple(shapes.items()), frozenset())


def require_same_beside_nan(kernels, made, ids, run):
    """Results in segment 1 do not change where the other segments are NaN."""
    truth = truth_of_row(made)
    x = {name: filled(a, ids != 1, np.nan) for name, a in truth.x.items()}
    invalid = truth._replace(x=x, cotangent=filled(truth.cotangent, ids != 1, np.nan))
    (y, _, expected), (found, _, result) = (
        run(kernels, made.leaf, each) for each in (truth, invalid)
    )
    for name, array in (expected | {"y": y}).items():
        other = (result | {"y": found})[name]
        np.testing.assert_array_equal(other[:, ids[0] != 1], array[:, ids[0] != 1], name)
