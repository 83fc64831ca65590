"""The two published head layouts of differential attention.

A layer with 2h query heads has h pairs. The layout determines which heads form a pair, and weights
trained with one layout can not be used with the other:

    adjacent:   (2i, 2i + 1)      microsoft/unilm
    halves:     (i, i + h)        Hugging Face Transformers' diffllama
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace

LAYOUTS = ("adjacent", "halves")


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

    if layout not in LAYOUTS:
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
