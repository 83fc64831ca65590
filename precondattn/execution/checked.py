"""`with pa.checked():`, in which calls examine the values of their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from precondattn.execution import checks


@contextmanager
def checked(*, layout: bool = True) -> Iterator[None]:
    """Examine the values of all inputs of every call in the context, before it is computed.

    Values must be finite, and in the range that their input declares: gates at most 0, strengths
    and contractions between their bounds, temperatures above 0, keys and directions of length at
    most 1 where a mechanism wants length 1. Padding and masked keys are not examined. It takes a
    pass over the inputs, and waits for a device. The environment variable `PRECONDATTN_CHECKED=1`
    does it for a whole process.

    Values that are traced can not be examined (`jax.jit`, `torch.compile`, transforms): that is a
    `NotCheckedWarning`. A function that was compiled before is not examined and does not warn.

    Parameters
    ----------
    layout : bool
        Whether a full call of several tokens with more heads than tokens is an error too, as
        arrays (b, h, t, d) give.

    Raises
    ------
    ValueError
        by a call: it names the input, the place and value of its first fault, and a remedy.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> with pa.checked():
    ...     out = pa.delta(q, k, v, beta=np.ones((1, 6, 2)))
    """
    token = checks.opened(checks.Checks(layout))
    try:
        yield
    finally:
        checks.close(token)
