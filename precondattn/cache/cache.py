"""The cache of a batch of sequences, and what can be done with it.

A cache is `Cache(length, store, kinds)`: the number of tokens of each sequence, buffers, and what
each buffer holds. The key of a buffer is the value whose history it stores, so that a value that
several pieces read is stored once. All parts are plain tuples and dicts of arrays: pytrees in JAX
and PyTorch, and picklable. The layout belongs to the mechanism, not to a backend: one backend may
prefill a cache and another decode from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from precondattn.arrays import Array, Arrays, Device, DType
from precondattn.cache import capacity as capacities
from precondattn.cache import conversion, sequences
from precondattn.cache.crop import crop, fixed_buffers
from precondattn.cache.kept import checkpoints
from precondattn.cache.kinds import Kinds, capacity_of
from precondattn.cache.saved import from_state_dict, state_dict
from precondattn.cache.snapshots import Snapshot, restore, snapshot
from precondattn.cache.states import states_of
from precondattn.cache.windows import reach_of
from precondattn.given import Given


class Cache(NamedTuple):
    """The number of tokens per sequence (b,), and buffers by the value whose history they store.

    Every method returns a new cache, which shares no memory with the old one, in buffers of the
    same memory layout. All methods can be traced and differentiated.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 4))
    >>> lucid = pa.Lucid()
    >>> out, cache = lucid.extend(lucid.init_cache(q, k, v, capacity=8), q, k, v)
    >>> cache.crop(3).length, cache.reorder([1, 1, 0]).length
    (array([3, 3], dtype=int32), array([5, 5, 5], dtype=int32))
    >>> cache.grow(16).capacity
    16
    """

    length: Array
    """The number of tokens of each sequence, int32 (b,)."""
    store: dict[str, Array]
    """The buffers, (b, capacity, …) or of a size that does not depend on the tokens."""
    kinds: Kinds = {}  # noqa: RUF012  No cache writes to it.
    """What each buffer holds (`kinds.py`); a dict without arrays."""

    @property
    def capacity(self) -> int | None:
        """The number of tokens that fit in a sequence; None for a state and for a window."""
        return capacity_of(self)

    @property
    def states(self) -> Mapping[str, Array]:
        """The states by the names that the mechanism's page gives them; it can not be written to.

        Where several states have one name, the inputs that they depend on follow it, as in
        `"S(k2, v)"`. A state without such a name has the name of its buffer.
        `init_cache(..., states=...)` begins from them.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 4))
        >>> cache = pa.Linear(normalize=True).init_cache(q, k, v)
        >>> {name: state.shape for name, state in cache.states.items()}
        {'S': (2, 2, 4, 4), 'z': (2, 2, 4)}
        """
        return states_of(self)

    @property
    def can_crop(self) -> bool:
        """Whether `crop` works for any length; otherwise take a `snapshot`, and `restore` it.

        A cache of states can be cropped to its `checkpoints` only, and that of a window by an
        eighth of the window.
        """
        return not fixed_buffers(self) and reach_of(self) is None

    @property
    def checkpoints(self) -> list[list[int]]:
        """The lengths of each sequence of which the cache keeps the states: `crop` can go there.

        They are those of the last `extend`, with `keep` or `states_every`. Empty in a cache without
        states, which can be cropped to any length. They are read, and can not be traced.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 150, 2, 4))
        >>> linear = pa.Linear()
        >>> _, cache = linear.extend(linear.init_cache(q, k, v), q, k, v, states_every=64)
        >>> cache.checkpoints, cache.crop(64).length
        ([[64, 128]], array([64], dtype=int32))
        """
        return checkpoints(self)

    def crop(self, lengths: Given, *, donate: bool = False) -> Cache:
        """The cache of the first `lengths` tokens of each sequence.

        Extended, it gives what a cache gives that never had the other tokens. Kept states are
        dropped, so that it has the buffers that the cache had before the tokens were added.

        Parameters
        ----------
        lengths : int, or integers (b,)
            Between 0 and the number of tokens held. A list, or an array of the cache's library.
        donate : bool
            Write into the cache's own buffers where the library can (NumPy, PyTorch, CuPy). The
            old cache must not be used again.

        Raises
        ------
        ValueError
            if a buffer is a state that was not kept or has rewritten rows, for a length out of
            range, for one before the tokens that the cache of a window still holds, and for one
            that is no checkpoint of a cache of states. With a traced length that would raise, the
            later outputs of its sequence are NaN.
        """
        return crop(self, lengths, donate=donate)

    def snapshot(self) -> Snapshot:
        """What `restore` needs to go back to the tokens of now.

        It has copies of states and rewritten rows, and of a window; other buffers are not copied.
        """
        return snapshot(self)

    def restore(self, snapshot: Snapshot, *, donate: bool = False) -> Cache:
        """The cache as it was at `snapshot`, which may be restored again.

        Parameters
        ----------
        snapshot : Snapshot
            Of this cache, before it was extended. A cache that was reordered, selected, grown or
            converted since is another cache.
        donate : bool
            As in `crop`.

        Raises
        ------
        TypeError, ValueError
            for a snapshot of other shapes, or of more tokens than the cache holds.
        """
        return restore(self, snapshot, donate=donate)

    def reorder(self, indices: Given) -> Cache:
        """Sequence i of the result is sequence `indices[i]`, as beam search needs it.

        Parameters
        ----------
        indices : integers (b',)
            Between 0 and b − 1, in any order and number. A list, or an array of the cache's
            library; a traced index out of range makes the later outputs of its sequence NaN.
        """
        return sequences.reorder(self, indices)

    def select(self, rows: Given) -> Cache:
        """Some of the sequences, each at most once.

        Parameters
        ----------
        rows : slice, integers (b',), or booleans (b,)
            Integers may be traced; a mask may not, as the number of sequences depends on it.
        """
        return sequences.select(self, rows)

    def grow(self, capacity: int) -> Cache:
        """The same tokens with room for `capacity` tokens per sequence.

        The cache itself, if it has this capacity, or if it is a state or a window, which have no
        limit.

        Raises
        ------
        ValueError
            for a smaller capacity than it has.
        """
        return capacities.grow(self, capacity)

    def to(self, *, device: Device = None, dtype: DType = None) -> Cache:
        """The cache on another device, or in another dtype.

        Parameters
        ----------
        device : a device as the array library names it, optional
        dtype : str or dtype of the library, optional
            The dtype of the inputs that will follow: `"float32"`. In half precision, buffers that
            need float32 keep it.

        Raises
        ------
        TypeError
            for a dtype that is not floating, or that the library does not have.
        """
        return conversion.to(self, device, dtype)

    @classmethod
    def concatenate(cls, caches: Sequence[Cache]) -> Cache:
        """The sequences of all caches in one batch, at the largest of their capacities.

        Raises
        ------
        TypeError, ValueError
            for no caches, or for caches of other mechanisms, libraries, dtypes or devices.
        """
        caches = list(caches)
        if not caches or not all(isinstance(cache, cls) for cache in caches):
            raise TypeError("concatenate: a list of one or more caches expected")
        return sequences.concatenate(caches)

    def state_dict(self) -> Arrays:
        """A flat dict of arrays, each stored in the order of its axes, to be saved.

        Keys are `"length"`, and kind and name of each buffer, such as `"tokens: k"`.
        """
        return state_dict(self)

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, Array]) -> Cache:
        """The cache of a `state_dict()`, whose arrays are copied.

        Raises
        ------
        TypeError, ValueError
            for a missing `"length"`, an unknown key, or a value that is no array.
        """
        return cls(*from_state_dict(arrays))
