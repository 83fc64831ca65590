"""`pa.lucid(q, k, v)`: a mechanism is built from its options by keyword, and called at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Array, is_compiling
from precondattn.execution.build import build_and_call, options_of


def shorthand(cls: type[Mechanism]) -> Callable[..., Array]:
    """A function that builds a mechanism from keywords and calls it, such as `pa.lucid`.

    Its keywords are the mechanism's options, inputs and masks; a preconditioner is built around
    softmax, whose options it accepts too. An array for an optional input sets the option that
    declares this input, where only one value of one option does.

    Parameters
    ----------
    cls : type
        The class of a mechanism that can be constructed without arguments.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> temperature = pa.shorthand(pa.Temperature)
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> temperature(q, k, v, tau=np.ones(2), window=3).shape  # per="head"
    (1, 5, 2, 4)
    """

    def call(*arrays: Array, **named: Any) -> Array:
        if is_compiling():
            from precondattn.execution.torch.compile import captured_shorthand

            tensors = {name: value for name, value in named.items() if hasattr(value, "shape")}
            constants = {name: value for name, value in named.items() if name not in tensors}
            return captured_shorthand(
                cls.name,
                arrays,
                tuple(tensors),
                tuple(tensors.values()),
                tuple(constants),
                tuple(constants.values()),
            )
        return build_and_call(cls, arrays, named)

    own, of_base = options_of(cls)
    around = " around softmax" if of_base else ""
    call.__name__ = call.__qualname__ = cls.name
    call.__doc__ = (
        f"`{cls.__name__}`{around}, built and called: its inputs and masks, and as keywords the "
        f"options {', '.join([*own, *of_base])}. An optional input sets its own option."
    )
    return call
