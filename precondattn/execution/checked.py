"""`with pa.checked():`, in which calls examine the values of their inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_always = os.environ.get("PRECONDATTN_CHECKED", "0") not in ("", "0")
CHECKS: ContextVar[bool | None] = ContextVar("checks", default=True if _always else None)
"""Whether calls of this context check their layout besides values; None if they check neither."""


@contextmanager
def checked(*, layout: bool = True) -> Iterator[None]:
    """A context in which every call checks the values of all its inputs before it computes.

    Values must be finite, and in the range that their input declares: gates at most 0, strengths
    and contractions between their bounds, temperatures above 0, and keys and directions of length
    at most 1 if the mechanism expects length 1. Padding and masked keys are not checked. The check
    is one pass over the inputs, and waits for the device. The environment variable
    `PRECONDATTN_CHECKED=1` turns it on for a whole process.

    Traced values (`jax.jit`, `torch.compile`, transforms) can not be checked, and give a
    `NotCheckedWarning`. A function that was compiled earlier is not checked and does not warn.

    Parameters
    ----------
    layout : bool
        Whether a full call of several tokens with more heads than tokens is an error too. Such
        shapes are typical of arrays in the layout (b, h, t, d).

    Raises
    ------
    ValueError
        by a call in the context: the message names the input, the index and value of the first
        invalid entry, and a remedy.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> with pa.checked():
    ...     out = pa.delta(q, k, v, beta=np.ones((1, 6, 2)))
    """
    token = CHECKS.set(layout)
    try:
        yield
    finally:
        CHECKS.reset(token)
