"""The empty cache of a mechanism, for arrays like those that will be cached."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn import frameworks
from precondattn.algebra.declaration import FIXED, ShapeError, Sizes
from precondattn.algebra.piece import Piece
from precondattn.algebra.text import nearest
from precondattn.arrays import (
    HALF,
    dtype_name,
    fresh,
    is_distributed,
    library_of,
    namespace,
    placement,
)
from precondattn.cache import KEY_MASK, Cache, new_buffer
from precondattn.cache.kinds import STATE, TOKENS, WINDOW, Kind, Kinds, names_of_states
from precondattn.cache.known_lengths import remembered
from precondattn.cache.windows import FIRST, rows_of
from precondattn.execution.array_checks import check_arrays, check_device, check_stored, values_of
from precondattn.execution.cache_checks import check_cacheable, keeps_tokens
from precondattn.execution.input_names import INIT_OPTIONS, inputs_by_name
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.given import Given, at_least


def empty_cache(
    mechanism: Piece,
    arrays: tuple[Array, ...],
    named: ByName,
    capacity: int | None,
    key_mask: bool,
    states: ByName | None = None,
    sequences: int | None = None,
) -> Cache:
    """A cache without tokens, with room for `capacity` tokens per sequence, or with `states`."""
    if is_distributed(arrays, named):
        if states is not None or sequences is not None:
            raise TypeError(
                f"{mechanism}: init_cache of DTensors takes no states and no sequences; make the "
                f"cache of each device's part"
            )
        cache: Cache = frameworks.distributed.init_cache(
            mechanism, arrays, named, capacity, key_mask
        )
        return cache
    check_cacheable(mechanism)
    owner, has_tokens = str(mechanism), keeps_tokens(mechanism)
    declared = mechanism.inputs.extending()
    inputs = inputs_by_name(owner, declared, arrays, named, INIT_OPTIONS, complete=False)
    if capacity is None and has_tokens:
        raise TypeError(f"{owner}: missing capacity, the greatest number of tokens per sequence")
    capacity = None if capacity is None else at_least(1, f"{owner}: capacity", capacity)
    if not isinstance(key_mask, bool):
        raise TypeError(
            f"{owner}: key_mask must be true or false, whether the cache stores one; "
            f"found {type(key_mask).__name__}"
        )
    if not inputs:
        raise TypeError(f"{owner}: init_cache needs the inputs, for their shapes and dtype")
    inputs, _ = frameworks.of(next(iter(inputs.values()))).cast_inputs(declared, inputs)
    check_arrays(owner, declared, inputs)
    shapes = {n: tuple(a.shape) for n, a in inputs.items() if "c" not in declared[n].letters}
    sizes = declared.sizes(owner, shapes)
    sizes["c"] = capacity or 0
    if sequences is not None:
        sizes["b"] = at_least(1, f"{owner}: sequences", sequences)
    like = values_of(inputs)  # The buffers have its dtype.
    reach = mechanism.program.reach
    if reach is not None and sizes["c"] <= rows_of(reach):
        reach = None  # All tokens fit.
    if reach is not None:
        sizes["c"] = rows_of(reach)
    given = {} if states is None else _given_states(mechanism, states, sizes, like)
    store: Arrays = {}
    kinds: Kinds = {}
    for name, (slot, pattern) in mechanism.program.slots.items():
        unknown = set(pattern.letters.replace(FIXED, "")) - set(sizes)
        if unknown:
            needed = [n for n, p in mechanism.inputs.items() if unknown & set(p.letters)]
            raise ShapeError(
                f"{owner}: init_cache can not infer the size of {', '.join(sorted(unknown))} "
                f"from these inputs; pass {', '.join(needed)} too"
            )
        buffer = given[name] if name in given else new_buffer(slot, pattern.shape(sizes), like)
        store[name] = buffer
        kinds[name] = {str(slot.kind): ()}
    xp = namespace(like)
    if key_mask and has_tokens:
        store[KEY_MASK] = xp.zeros((sizes["b"], sizes["c"]), dtype=xp.bool, **placement(like))
        kinds[KEY_MASK] = {TOKENS: ()}
    if reach is not None:
        store[FIRST] = xp.zeros((sizes["b"],), dtype=xp.int32, **placement(like))
        kinds[FIRST] = {str(Kind(WINDOW, window=reach + 1)): ()}
    length = xp.zeros((sizes["b"],), dtype=xp.int32, **placement(like))
    return Cache(remembered(length, 0), store, kinds)


def _given_states(mechanism: Piece, states: Given, sizes: Sizes, like: Array) -> Arrays:
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
