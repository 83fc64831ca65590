"""Two tiers: what anyone waits for, and what has to pass before a change lands.

The first is the default, `python -m pytest`: each property once for each class of code that could
break it. The second, `-m "thorough and not slow"`, is the rest: other expressions, larger data,
compilers, processes, and kernels that are interpreted for long. `slow` is for the nights.

A test is in the second tier

* if it is marked `thorough`; `thorough(but=(id, …))` leaves the parameters with these ids in the
  first;
* if one of its parameters is a declared expression that is not a representative. Where none of a
  test's parameters is one, or those that are one are slow, the first is in the first tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache

import pytest

from tests.representatives import REPRESENTATIVES


def sort_into_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark what belongs to the second tier."""
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    for members in by_test.values():
        _keep_exceptions(members)
        quick = [item for item in members if not item.get_closest_marker("slow")]
        others = [item for item in quick if not _expressions_of(item) <= _representatives()]
        for item in others[len(others) == len(quick) :]:
            item.add_marker("thorough")


def _keep_exceptions(members: list[pytest.Item]) -> None:
    marker = members[0].get_closest_marker("thorough")
    but = () if marker is None else marker.kwargs.get("but", ())
    kept = [item for item in members if _id(item) in but]
    is_whole = not any("::" in str(argument) for argument in members[0].config.args)
    if is_whole and len(kept) != len(but):
        raise pytest.UsageError(f"{members[0].nodeid}: one of thorough(but={but}) is no parameter")
    for item in kept:
        item.own_markers = [own for own in item.own_markers if own.name != "thorough"]


def _id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)


def _expressions_of(item: pytest.Item) -> set[str]:
    """The declared expressions among the parameters of a test, also as groups of cases."""
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else list(callspec.params.values())
    texts = [getattr(value, "mechanism", value) for value in values]
    return {text for text in texts if isinstance(text, str) and text in _declared()}


@cache
def _declared() -> frozenset[str]:
    from precondattn_conformance.declared import expressions

    return frozenset(expressions())


@cache
def _representatives() -> frozenset[str]:
    return frozenset(REPRESENTATIVES)
