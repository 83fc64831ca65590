"""The signature of a call: everything that its checks and its plan depend on.

It never depends on the entries of arrays. Calls of one signature share their checks and their plan
(`preparation.py`). A call has no signature, and is checked and planned every time, if its arrays
are traced, transformed, distributed or of a subclass, or in a mode of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from precondattn.algebra.call import Call
from precondattn.cache import Cache
from precondattn.dispatch import discovery
from precondattn.frameworks import of
from precondattn.given import Given


def signature_of(call: Call) -> Hashable | None:
    """The signature of a call; None for a call that has none."""
    verb, mechanism, arrays, named, masks, backend, cache, _, _ = call
    arguments = (*arrays, *named.values(), *masks.values())
    names: object = (*named,)
    if cache is not None:
        if type(cache) is not Cache or type(cache.store) is not dict:
            return None
        arguments = (*arguments, cache.length, *cache.store.values())
        names = (names, *cache.store)
    described: list[Hashable] = []
    state: Hashable | None = None
    for argument in arguments:
        if argument is None:  # A mask that is not given.
            described.append(None)
            continue
        cls = type(argument)
        if cls not in _described_by:
            framework = of(argument)
            is_array = framework.name is not None
            describe = framework.description(argument) if is_array else None
            _described_by[cls] = describe, framework.state_of_calls
        describe, state_of = _described_by[cls]
        if describe is None:
            return None
        if state is None:  # One library: the first argument determines it.
            state = True if state_of is None else state_of(argument)
            if state is None:
                return None
        try:
            described.append(describe(argument))
        except RuntimeError:  # A nested tensor has no shape; every call refuses it.
            described.append("no shape")
    # The name always means the same mechanism, and a text is fast to hash.
    if not discovery.changes:
        discovery.discover()  # What it finds is counted too.
    if backend is None:
        allowed = discovery.chosen_names.get()
    else:
        allowed = discovery.allowed_backends(backend)
    chosen = allowed, discovery.changes
    return verb, mechanism._name, names, len(arrays), chosen, state, tuple(described)


Describe = Callable[[Given], Hashable]

# Lists and tuples are lengths or the like, which every call checks.
_described_by: dict[type, tuple[Describe | None, Describe | None]] = dict.fromkeys(
    (list, tuple), (lambda _: "numbers", None)
)
"""The functions that describe arguments of a type, and the state of their framework; without the
first, calls with such arguments have no signature."""
