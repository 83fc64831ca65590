"""Removing tokens from a cache that can not be cropped: a state, or a window.

Drafts are verified by one call, and then the wrong ones are removed. Where the drafts are known and
the cache is a state, the call keeps the states before each of them. Otherwise the cache before each
call is kept as it was, and what the layer was called with. To remove tokens, the layer goes back to
the last cache before them and computes attention for the tokens in between again, without the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precondattn.cache import Cache

Extend = Callable[[Cache, int], Cache]
"""A function that extends a cache by the given number of a call's first tokens."""


class RecordedCall(NamedTuple):
    """A recorded call of a layer."""

    before: Cache
    seen: int
    """The number of columns before the call."""
    extend: Extend


class DraftRecording(list[RecordedCall]):
    """The recorded calls since the last `crop`."""

    def before(self, left: int) -> Cache | None:
        """The cache of the first `left` columns; None if they were not recorded."""
        call = next((call for call in reversed(self) if call.seen <= left), None)
        if call is None:
            return None
        count = left - call.seen
        return call.extend(call.before, count) if count else call.before
