"""From an expression to a mechanism (`text.py`), also in compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from precondattn.algebra import registry
from precondattn.algebra.text import read
from precondattn.algebra.verbs import parsed_in_graph
from precondattn.arrays import is_traced_by_dynamo

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


def parse(text: str) -> Mechanism:
    """The mechanism that an expression names.

    Raises
    ------
    ValueError
        for text that is not an expression, an unknown name or option, or an option out of range.
    TypeError
        for a composition that is refused, with the reason.

    Examples
    --------
    >>> import precondattn as pa
    >>> pa.parse("lucid[eps=0](laser)") == pa.Lucid(pa.Laser(), eps=0)
    True
    >>> str(pa.Lucid(pa.Softmax(window=128)))
    'lucid(softmax[window=128])'
    """
    if is_traced_by_dynamo():
        constant: Mechanism = parsed_in_graph(text)
        return constant
    mechanism: Mechanism = read(text)
    return mechanism


def mechanisms() -> dict[str, type[Mechanism]]:
    """The bases and preconditioners that an expression can name, by name.

    Examples
    --------
    >>> import precondattn as pa
    >>> pa.mechanisms()["lucid"].__name__
    'Lucid'
    """
    known = cast("dict[str, type[Mechanism]]", registry.registered())
    return {n: c for n, c in known.items() if c.role in ("base", "preconditioner")}
