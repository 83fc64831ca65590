"""The empty cache of a mechanism, for arrays like those that will be cached."""

from __future__ import annotations

from precondattn import frameworks
from precondattn.algebra.declaration import FIXED, ShapeError
from precondattn.algebra.piece import Piece
from precondattn.arrays import is_distributed, namespace, placement
from precondattn.cache import KEY_MASK, Cache, new_buffer
from precondattn.cache.kinds import TOKENS, WINDOW, Kind, Kinds
from precondattn.cache.known_lengths import remembered
from precondattn.cache.windows import FIRST, rows_of
from precondattn.execution.array_checks import check_arrays, values_of
from precondattn.execution.cache_checks import check_cacheable, keeps_tokens
from precondattn.execution.given_states import given_states
from precondattn.execution.input_names import INIT_OPTIONS, inputs_by_name
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.given import at_least


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
    given = {} if states is None else given_states(mechanism, states, sizes, like)
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
