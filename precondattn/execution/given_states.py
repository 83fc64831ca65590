"""The initial states of a cache, checked and copied: `init_cache(..., states={"S": S0})`."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.algebra.declaration import ShapeError, Sizes
from precondattn.algebra.piece import Piece
from precondattn.algebra.text import nearest
from precondattn.arrays import HALF, Array, Arrays, dtype_name, fresh, library_of
from precondattn.cache.kinds import STATE, names_of_states
from precondattn.execution.array_checks import check_device, check_stored
from precondattn.given import Given


def given_states(mechanism: Piece, states: Given, sizes: Sizes, like: Array) -> Arrays:
    """Copies of the given states, by the names of their buffers."""
    owner, slots = str(mechanism), mechanism.program.slots
    # The buffers of each leaf whose cache has only states.
    of_leaves = [
        [*keys.values()]
        for keys in mechanism.program.slot_keys
        if all(slots[name][0].kind.rows == STATE for name in keys.values())
    ]
    if not isinstance(states, Mapping):
        raise TypeError(
            f"{owner}: states must be a dict of arrays by name, as cache.states has them; "
            f"found {type(states).__name__}"
        )
    of_states = {name for names in of_leaves for name in names}
    names = names_of_states({n: slot.kind for n, (slot, _) in slots.items() if n in of_states})
    if states and not names:
        raise ValueError(f"{owner}: its cache holds tokens and no states; found states")
    short_names = {name: short for short, name in names.items()}
    store: Arrays = {}
    for short, state in states.items():
        name = str(names.get(short, short))
        if name not in short_names:
            hint = nearest(short, [*names]) if isinstance(short, str) else ""
            raise ValueError(
                f"{owner}: states has no {short!r}{hint}; the states are {', '.join(names)}"
            )
        what, (slot, pattern) = f"{owner}: states[{short!r}]", slots[name]
        if name in store:
            raise ValueError(f"{what} is given by two names")
        library, shape = library_of(like), pattern.shape(sizes)
        if library_of(state) != library:
            found = type(state).__name__ if library_of(state) is None else library_of(state)
            raise TypeError(f"{what} must be an array of {library}, as the inputs; found {found}")
        check_stored(what, state)
        if tuple(state.shape) != shape:
            is_of_others = tuple(state.shape)[1:] == shape[1:]
            hint = f"; write sequences={state.shape[0]}" if is_of_others else ""
            raise ShapeError(
                f"{what} must have shape ({', '.join(map(str, pattern.axes))}), here {shape}; "
                f"found {tuple(state.shape)}{hint}"
            )
        dtype = "float32" if slot.wide and dtype_name(like) in HALF else dtype_name(like)
        if dtype_name(state) != dtype:
            raise TypeError(f"{what} must have dtype {dtype}; found {dtype_name(state)}")
        check_device(what, state, like)
        store[name] = fresh(state)
    for of_leaf in of_leaves:  # All states of a leaf must be given.
        missing = [short_names[name] for name in of_leaf if name not in store]
        if missing and len(missing) < len(of_leaf):
            together = ", ".join(short_names[name] for name in of_leaf)
            raise ValueError(
                f"{owner}: the states {together} belong together; missing {', '.join(missing)}"
            )
    return store
