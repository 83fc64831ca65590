"""The cache of a batch of sequences, with its operations as methods.

A cache is `Cache(length, store, kinds)`: the number of tokens of each sequence, the buffers, and
the kind of each buffer. The key of a buffer names the value whose history it stores, such as "k",
so that a value which several pieces read is stored once. All parts are plain tuples and dicts of
arrays: they are pytrees in JAX and PyTorch, and can be pickled. The mechanism determines the
layout, not the backend: one backend may prefill a cache, and another decode from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from precondattn.arrays import Array, Arrays, Device, DType
from precondattn.cache import capacity as capacities
from precondattn.cache import conversion, sequences
from precondattn.cache.crop import crop, fixed_buffers
from precondattn.cache.kept import checkpoints
from precondattn.cache.kinds import Kinds, capacity_of, kinds_of, names_of_states
from precondattn.cache.saved import from_state_dict, state_dict
from precondattn.cache.snapshots import Snapshot, restore, snapshot
from precondattn.cache.windows import reach_of
from precondattn.given import Given


class Cache(NamedTuple):
    """The tokens or states of b sequences, from which `extend` continues.

    Every method that returns a cache returns a new one, which shares no memory with the old one and
    has buffers of the same memory layout. All methods can be traced and differentiated.

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
    """The buffers by name: (b, capacity, …) for tokens, or a state, whose size is fixed."""
    kinds: Kinds = {}  # noqa: RUF012  No cache writes to it.
    """The kind of each buffer (`kinds.py`); a dict without arrays."""

    @property
    def capacity(self) -> int | None:
        """The number of tokens that fit in a sequence; None for states, and for a window."""
        return capacity_of(self)

    @property
    def states(self) -> Mapping[str, Array]:
        """The states by their short names on the mechanism's page, as a read-only mapping.

        If several states have one short name, the inputs that they depend on follow it, as in
        `"S(k2, v)"`. A state without a short name has the name of its buffer.
        `init_cache(..., states=...)` takes such a mapping, and begins from these states.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 4))
        >>> cache = pa.Linear(normalize=True).init_cache(q, k, v)
        >>> {name: state.shape for name, state in cache.states.items()}
        {'S': (2, 2, 4, 4), 'z': (2, 2, 4)}
        """
        names = names_of_states(kinds_of(self))
        return MappingProxyType({short: self.store[name] for short, name in names.items()})

    @property
    def can_crop(self) -> bool:
        """Whether `crop` works for any length.

        A cache of states can be cropped to its `checkpoints` only, and the cache of a window by at
        least an eighth of the window. For other lengths take a `snapshot` first, and `restore` it.
        """
        return not fixed_buffers(self) and reach_of(self) is None

    @property
    def checkpoints(self) -> list[list[int]]:
        """The lengths of each sequence whose states are kept, and which `crop` can go back to.

        The last `extend` kept them, with `keep` or `states_every`. The lists are empty in a cache
        without states, which can be cropped to any length. The lengths are read from the device,
        and can not be traced.

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
        """The cache with only the first `lengths` tokens of each sequence.

        Extending it gives the same result as extending a cache that never had the other tokens.
        Kept states are dropped, so that it has the buffers of a cache before `keep` was used.

        Parameters
        ----------
        lengths : int, or integers (b,)
            The new lengths, from 0 to the number of cached tokens. A list, or an array of the
            cache's library.
        donate : bool
            Write into the cache's own buffers where the library can (NumPy, PyTorch, CuPy). The
            old cache must not be used again.

        Raises
        ------
        ValueError
            if a buffer is a state without kept states, or has rewritten rows; for a length out of
            range; for a length that the cache of a window no longer has the tokens for; and for a
            length that is not one of `checkpoints` in a cache of states. A traced length that is
            invalid makes the later outputs of its sequence NaN.
        """
        return crop(self, lengths, donate=donate)

    def snapshot(self) -> Snapshot:
        """A record of the present tokens, to which `restore` can go back.

        It has copies of states, of rewritten rows, and of all buffers of a window. Other buffers
        are not copied, because they can be cropped.
        """
        return snapshot(self)

    def restore(self, snapshot: Snapshot, *, donate: bool = False) -> Cache:
        """The cache as it was when `snapshot` was taken. A snapshot may be restored several times.

        Parameters
        ----------
        snapshot : Snapshot
            A snapshot of this cache from before it was extended. It does not fit after `reorder`,
            `select`, `grow` or `to`.
        donate : bool
            As in `crop`.

        Raises
        ------
        TypeError, ValueError
            for a snapshot of other shapes, or with more tokens than the cache.
        """
        return restore(self, snapshot, donate=donate)

    def reorder(self, indices: Given) -> Cache:
        """The cache whose sequence i is sequence `indices[i]` of this one, as in beam search.

        Parameters
        ----------
        indices : integers (b',)
            Indices from 0 to b − 1; they may repeat. A list, or an array of the cache's library. A
            traced index out of range makes the later outputs of its sequence NaN.
        """
        return sequences.reorder(self, indices)

    def select(self, rows: Given) -> Cache:
        """The cache of some of the sequences, each at most once.

        Parameters
        ----------
        rows : slice, integers (b',), or booleans (b,)
            The sequences to keep. Integers may be traced. Booleans may not, because the number of
            sequences depends on them.
        """
        return sequences.select(self, rows)

    def grow(self, capacity: int) -> Cache:
        """The cache with room for `capacity` tokens per sequence.

        It is the cache itself if the capacity is the same, or if it is a cache of states or of a
        window, which has no limit.

        Raises
        ------
        ValueError
            for a smaller capacity than the present one.
        """
        return capacities.grow(self, capacity)

    def to(self, *, device: Device = None, dtype: DType = None) -> Cache:
        """The cache on another device, or in another dtype.

        Parameters
        ----------
        device : device or str, optional
            A device of the array library; in PyTorch and array-api-strict also its name.
        dtype : str or dtype of the library, optional
            The dtype of later inputs, such as `"float32"`. For half precision, buffers that need
            float32 keep it.

        Raises
        ------
        TypeError
            for a dtype that is not floating-point, or that the library does not have.
        """
        return conversion.to(self, device, dtype)

    @classmethod
    def concatenate(cls, caches: Sequence[Cache]) -> Cache:
        """The sequences of all caches in one batch, with the largest of their capacities.

        Raises
        ------
        TypeError, ValueError
            if there are no caches, or if their mechanisms, libraries, dtypes or devices differ.
        """
        caches = list(caches)
        if not caches or not all(isinstance(cache, cls) for cache in caches):
            raise TypeError("concatenate: a list of one or more caches expected")
        return sequences.concatenate(caches)

    def state_dict(self) -> Arrays:
        """A flat dict of arrays that can be saved, each in row-major order.

        The keys are `"version"` (that of this library, as three int32), `"length"`, and the kind
        and name of each buffer, such as `"tokens: k"`.
        """
        return state_dict(self)

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, Array]) -> Cache:
        """The cache with copies of the arrays of a `state_dict()`.

        Raises
        ------
        TypeError, ValueError
            for a missing `"length"`, an unknown key, or a value that is not an array.
        """
        return cls(*from_state_dict(arrays))
