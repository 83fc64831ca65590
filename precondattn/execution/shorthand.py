"""Shorthands such as `pa.lucid(q, k, v)`, which build a mechanism from keywords and call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import fill

from precondattn import frameworks
from precondattn.algebra.call import Call
from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.registry import MechanismClass
from precondattn.arrays import Array, is_compiling
from precondattn.execution.build import built, options_of
from precondattn.execution.input_names import MASKS
from precondattn.given import Given

WIDTH = 96


def shorthand(cls: type[Mechanism]) -> Callable[..., Array]:
    """A function that builds a mechanism from keywords and calls it, such as `pa.lucid`.

    Its keywords are the mechanism's options, inputs and masks. A preconditioner is built around
    softmax, whose options are accepted too. An array for an optional input sets the option that
    declares this input, if only one value of one option does.

    Parameters
    ----------
    cls : type
        A class of mechanisms that can be constructed without arguments.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> temperature = pa.shorthand(pa.Temperature)
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> temperature(q, k, v, tau=np.ones(2), window=3).shape  # per="head"
    (1, 5, 2, 4)
    """

    def call(*arrays: Array, **named: Given) -> Array:
        if is_compiling():
            return frameworks.in_graph.captured_shorthand(cls.name, arrays, named)
        from precondattn.execution.run import forward

        mechanism, rest = built(cls, named)
        backend = rest.pop("backend", None)
        masks = dict.fromkeys(MASKS)
        for name in rest.keys() & MASKS:
            masks[name] = rest.pop(name)
        return forward(Call("forward", mechanism, arrays, rest, masks, backend))

    equation = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    hashable: MechanismClass = cls
    lists = zip(("Options", "Those of the softmax inside"), options_of(hashable), strict=True)
    options = [fill(f"{title}: {', '.join(names)}.", WIDTH) for title, names in lists if names]
    about = f"`{cls.__name__}`, built from its options and called. An optional input sets its own."
    call.__name__ = call.__qualname__ = cls.name
    call.__doc__ = "\n".join([equation, "", about, *options])
    call.__wrapped__ = _DeclaredCall(cls)  # type: ignore[attr-defined]
    return call


class _DeclaredCall:
    """The descriptor from which `inspect` gets the signature of a shorthand, when it is needed."""

    def __init__(self, cls: MechanismClass) -> None:
        self.cls = cls

    @property
    def __signature__(self) -> inspect.Signature:
        from precondattn.execution.parameters_of_calls import signature_of_shorthand

        return signature_of_shorthand(self.cls)
