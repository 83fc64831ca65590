"""The states of a cache by their short names, such as S, from the mechanism's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from precondattn.arrays import ByName
from precondattn.cache.kinds import STATE, CacheLike, Kind, kinds_of


def states_of(cache: CacheLike) -> ByName:
    names = names_of_states(kinds_of(cache))
    return MappingProxyType({short: cache.store[name] for short, name in names.items()})


def names_of_states(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """The name of each state's buffer, by the state's short name.

    If several states have one symbol, the inputs of the buffer follow it, as in "S(k2, v)".
    """
    symbols = {name: kind.symbol for name, kind in kinds.items() if kind.rows == STATE}
    short = {name: symbol or name for name, symbol in symbols.items()}
    for with_arguments in (True, False):
        count = Counter(short.values())
        for name, text in short.items():
            if count[text] > 1:
                arguments = name[name.find("(") :] if "(" in name else ""
                short[name] = symbols[name] + arguments if with_arguments else name
    return {text: name for name, text in short.items()}
