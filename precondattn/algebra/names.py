"""Names of mechanisms and groups: texts from which a PyTorch operator finds a piece again.

The name is the piece's text if that parses back to an equal piece, also in another process. Any
other piece gets its text and a number, which is valid in this process only, and is kept for its
life: its class has no `name`, or was defined again. A name never changes its meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import count

from precondattn.algebra import registry
from precondattn.algebra.options import fields_of
from precondattn.algebra.piece import Piece
from precondattn.algebra.registry import AnyMechanism

named_pieces: dict[str, Piece] = {}


def name_of(piece: Piece) -> str:
    """The name of a mechanism or group; `group.piece_named` returns an equal piece."""
    text = str(piece)
    if is_ours(piece) and parses_back(piece):
        return text
    if (text in named_pieces or parses_back(piece)) and _owns(text, piece):
        return text
    return next(name for name in (f"{text} #{n}" for n in count(1)) if _owns(name, piece))


def _owns(name: str, piece: Piece) -> bool:
    """Whether the name belongs to this piece; a free name is given to it."""
    owner = named_pieces.setdefault(name, piece)
    return owner is piece or bool(owner == piece)


def is_ours(piece: Piece) -> bool:
    """Whether all classes of a piece are in this package."""
    return all(type(m).__module__.startswith("precondattn.") for m in _mechanisms(piece))


def parses_back(piece: Piece) -> bool:
    """Whether the text of a piece determines it, by registered classes and their options."""
    for each in _mechanisms(piece):
        fields = {field.name for field in dataclasses.fields(each)} - {"base"}
        if registry.known(each.name) is not type(each) or fields != set(fields_of(each)):
            return False
    return True


def _mechanisms(piece: AnyMechanism) -> Iterator[AnyMechanism]:
    """A mechanism and its bases, or the mechanisms of a group's leaves."""
    calls = getattr(piece, "calls", None)
    for mechanism in (piece,) if calls is None else calls.leaves:
        while mechanism is not None:
            yield mechanism
            mechanism = getattr(mechanism, "base", None)
