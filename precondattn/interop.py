"""Arguments and layouts of other projects: those of Mamba-2, and the heads of differential layers.

Mamba-2's arguments become inputs of `SSD`:

    q = C,  k = B,  v = Δ x,  g = Δ A,      y = ssd(q, k, v, g) + D x

with one B and C for each group of heads, A < 0, and Δ = softplus(dt + bias), clipped, or Δ = dt.
Source: Mamba-2 (arXiv 2405.21060) 5–7.

A differential layer with 2h query heads has h pairs. Weights trained with one of the two published
layouts can not be used with the other:

    adjacent:   (2i, 2i + 1)      microsoft/unilm
    halves:     (i, i + h)        Hugging Face Transformers' diffllama
"""

from __future__ import annotations

import math

from precondattn import frameworks
from precondattn.algebra.declaration import Inputs
from precondattn.arrays import Array, Arrays, cast, is_compiling, library_of, namespace, upcast
from precondattn.given import Arguments, Given
from precondattn.spec.scaled_dims import softplus
from precondattn.spec.ssd import SSD

DECLARED = {
    "x": "b t u e",
    "dt": "b t u",
    "A": "u in (-inf, 0]",
    "B": "b t h d",
    "C": "b t h d",
    "D": "u",
    "dt_bias": "u",
}


def mamba2_inputs(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> dict[str, Array]:
    """The inputs `q`, `k`, `v` and `g` of `SSD`, from arguments with Mamba-2's names.

    Parameters
    ----------
    x : array (b, t, u, e)
        Values of u heads.
    dt : array (b, t, u)
        Step sizes Δ, or the numbers from which `dt_bias` and `dt_softplus` compute Δ.
    A : array (u,)
        Decay rates, at most 0; −exp(A_log) in a layer.
    B, C : array (b, t, h, d)
        Keys and queries, one per group. The number h of groups divides u; head i is in group
        ⌊i h / u⌋.
    dt_bias : array (u,), optional
        A bias that is added to dt.
    dt_softplus : bool
        Whether Δ = softplus(dt).
    dt_limit : (float, float)
        The range to which Δ is clipped.

    Returns
    -------
    dict
        The inputs by name. If x is in half precision, `g` is in float32; the others have the dtype
        of x. All are differentiable if the library has automatic differentiation.

    Raises
    ------
    TypeError, ValueError
        for inconsistent shapes, dtypes or libraries; the message names the argument.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> x, dt, A = rng.normal(size=(1, 5, 8, 4)), rng.normal(size=(1, 5, 8)), -np.ones(8)
    >>> B, C = rng.normal(size=(2, 1, 5, 2, 16))  # two groups
    >>> inputs = pa.mamba2_inputs(x, dt, A, B, C, dt_softplus=True)
    >>> {name: array.shape for name, array in inputs.items()}
    {'q': (1, 5, 2, 16), 'k': (1, 5, 2, 16), 'v': (1, 5, 8, 4), 'g': (1, 5, 8)}
    >>> pa.SSD()(**inputs).shape
    (1, 5, 8, 4)
    """
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    arguments = _checked(arguments if dt_bias is None else {**arguments, "dt_bias": dt_bias})
    x, dt = arguments["x"], arguments["dt"]
    low, high = _limits(dt_limit)
    xp = namespace(x)
    step = upcast(dt)
    if dt_bias is not None:
        step = step + upcast(arguments["dt_bias"])
    if dt_softplus:
        step = softplus(step)
    step = xp.clip(step, min=low, max=None if high == math.inf else high)
    v = cast(step[..., None] * upcast(x), x.dtype)
    return {"q": arguments["C"], "k": arguments["B"], "v": v, "g": step * upcast(arguments["A"])}


def mamba2(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Array:
    """The output y (b, t, u, e) of Mamba-2's recurrence, including D x, from its own arguments.

    The arguments are those of `mamba2_inputs`, and optionally D (u,), the skip connection. There is
    no gate z, no initial state and no packing: for caches and masks, call `SSD` with the result of
    `mamba2_inputs`.

    Examples
    --------
    A state that is halved at every token, plus 10 x:

    >>> import numpy as np, precondattn as pa
    >>> x = np.asarray([1.0, 0, 0]).reshape(1, 3, 1, 1)
    >>> dt, A, ones = np.ones((1, 3, 1)), np.log([0.5]), np.ones((1, 3, 1, 1))
    >>> pa.mamba2(x, dt, A, ones, ones, D=np.asarray([10.0])).ravel()
    array([11.  ,  0.5 ,  0.25])
    """
    arrays = x, dt, A, B, C
    options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if is_compiling():
        of = "precondattn.interop:compute"
        return frameworks.in_graph.captured(of, D, arrays, options)
    return compute(D, arrays, options)


def compute(D: Array | None, arrays: tuple[Array, ...], options: Arguments) -> Array:
    """The output of `mamba2`, from the arrays and the options of `mamba2_inputs`."""
    x = arrays[0]
    if D is not None:
        _checked({"x": x, "D": D})
    y = SSD()(**mamba2_inputs(*arrays, **options))
    return y if D is None else y + cast(upcast(D)[:, None] * upcast(x), y.dtype)


def _limits(dt_limit: Given) -> tuple[float, float]:
    try:
        low, high = map(float, dt_limit)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 <= low < high:
        raise ValueError(f"mamba2: dt_limit must be 0 <= low < high; found {dt_limit!r}")
    return low, high


def _checked(arguments: Arrays) -> Arrays:
    """The checked arguments, cast by PyTorch's autocast if it is on."""
    from precondattn.execution.array_checks import check_arrays

    for name, array in arguments.items():
        if library_of(array) is None:
            raise TypeError(f"mamba2: {name} must be an array; found {type(array).__name__}")
    declared = Inputs(**{name: DECLARED[name] for name in arguments})
    framework = frameworks.of(next(iter(arguments.values())))
    arguments, _ = framework.cast_inputs(declared, arguments)
    check_arrays("mamba2", declared, arguments)
    declared.sizes("mamba2", {name: tuple(array.shape) for name, array in arguments.items()})
    return arguments


def split_heads(x: Array, layout: str) -> tuple[Array, Array]:
    """The first and the second heads of all pairs, each (b, t, h, d), from x (b, t, 2h, d).

    Use it for queries and for keys: `q, q2 = split_heads(queries, "halves")`. Keys with fewer heads
    are split in the same way; both numbers of heads must be even. (unilm's flash-attention code
    does this; its other version repeats key heads before pairing.)

    Parameters
    ----------
    x : array (b, t, 2h, d)
        The heads of all pairs.
    layout : {"adjacent", "halves"}
        "adjacent" pairs heads 2i and 2i + 1 (microsoft/unilm), "halves" i and i + h (diffllama).

    Raises
    ------
    TypeError, ValueError
        if x is not an array of four axes, for an odd number of heads, or an unknown layout.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(4).reshape(1, 1, 4, 1)
    >>> [half.ravel().tolist() for half in split_heads(x, "adjacent")]
    [[0, 2], [1, 3]]
    >>> [half.ravel().tolist() for half in split_heads(x, "halves")]
    [[0, 1], [2, 3]]
    """
    from precondattn.execution.array_checks import check_stored

    if layout not in ("adjacent", "halves"):
        raise ValueError(f"layout must be 'adjacent' or 'halves'; found {layout!r}")
    check_stored("x", x)
    if x.ndim != 4 or x.shape[2] % 2:
        raise ValueError(
            f"x must have shape (b, t, 2h, d), with an even number of heads; found {tuple(x.shape)}"
        )
    if layout == "halves":
        half = x.shape[2] // 2
        return x[:, :, :half, :], x[:, :, half:, :]
    return x[:, :, 0::2, :], x[:, :, 1::2, :]


def pair_values(v: Array, layout: str) -> Array:
    """The values of all pairs (b, t, n, 2e), from v (b, t, 2n, e), by concatenating paired heads.

    The values of differential attention are twice as wide as its keys. unilm projects to n heads of
    that width. diffllama projects to 2n heads in the layout "halves", which this function joins.

    Examples
    --------
    >>> import numpy as np
    >>> pair_values(np.arange(4).reshape(1, 1, 4, 1), "halves").reshape(2, 2).tolist()
    [[0, 2], [1, 3]]
    """
    halves = split_heads(v, layout)
    return namespace(v).concat(list(halves), axis=3)
