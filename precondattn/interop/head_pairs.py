"""The two public head layouts of differential attention.

A layer of 2h query heads makes h pairs. Which heads form a pair is a matter of layout, and weights
trained with one are of no use to the other:

    adjacent:   (2i, 2i + 1)      microsoft/unilm
    halves:     (i, i + h)        Hugging Face Transformers' diffllama
"""

from __future__ import annotations

from precondattn.arrays import Array, library_of, namespace

LAYOUTS = ("adjacent", "halves")


def split_heads(x: Array, layout: str) -> tuple[Array, Array]:
    """The first and the second heads of all pairs, each (b, t, h, d), of x (b, t, 2h, d).

    For queries and for keys: `q, q2 = split_heads(queries, "halves")`. With fewer key heads than
    query heads the keys are split alike; there has to be an even number of both. (unilm's
    flash-attention code does so; its other version repeats key heads before it pairs them.)

    Parameters
    ----------
    x : array (b, t, 2h, d)
    layout : {"adjacent", "halves"}
        "adjacent" pairs heads 2i and 2i + 1 (microsoft/unilm), "halves" i and i + h (diffllama).

    Raises
    ------
    TypeError, ValueError
        for what is no array of four axes, an odd number of heads, or an unknown layout.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(4).reshape(1, 1, 4, 1)
    >>> [half.ravel().tolist() for half in split_heads(x, "adjacent")]
    [[0, 2], [1, 3]]
    >>> [half.ravel().tolist() for half in split_heads(x, "halves")]
    [[0, 1], [2, 3]]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be 'adjacent' or 'halves'; found {layout!r}")
    if library_of(x) is None:
        raise TypeError(f"x must be an array (b, t, 2h, d); found {type(x).__name__}")
    if x.ndim != 4 or x.shape[2] % 2:
        raise ValueError(
            f"x must have shape (b, t, 2h, d), with an even number of heads; found {tuple(x.shape)}"
        )
    if layout == "halves":
        half = x.shape[2] // 2
        return x[:, :, :half, :], x[:, :, half:, :]
    return x[:, :, 0::2, :], x[:, :, 1::2, :]


def pair_values(v: Array, layout: str) -> Array:
    """The values of all pairs (b, t, n, 2e), of v (b, t, 2n, e): those of both heads, side by side.

    Differential attention's values are twice as wide as its keys. unilm projects them so, with n
    heads already; diffllama makes 2n heads, which this puts together. "halves" is its layout.

    Examples
    --------
    >>> import numpy as np
    >>> pair_values(np.arange(4).reshape(1, 1, 4, 1), "halves").reshape(2, 2).tolist()
    [[0, 2], [1, 3]]
    """
    halves = split_heads(v, layout)
    return namespace(v).concat(list(halves), axis=3)
