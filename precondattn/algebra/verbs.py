"""What can be done with a mechanism: call it, differentiate it, cache it, explain its plan.

The signatures and their documentation; `execution/` does the work. It is imported by the first
call, so that `import precondattn` stays as quick as importing NumPy. This module is the only one
that imports a room above its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from precondattn.arrays import Array, is_compiling
from precondattn.cache import Cache

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism
    from precondattn.dispatch.explanation import Explanation

BackendNames = str | tuple[str, ...] | None
ExtendPullback = Callable[..., tuple[dict[str, Array], dict[str, Array]]]


class Verbs:
    """The public methods of every mechanism."""

    _text: str
    """The mechanism's expression, and below the inputs that may be given by position: both at
    hand as plain constants, because Dynamo reads them."""
    _positional: tuple[str, ...]

    def __call__(
        self,
        *arrays: Array,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        lengths: Any = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> Array:
        """The output, of shape (b, t, h, e) and v's dtype. Differentiable in PyTorch and JAX.

        Parameters
        ----------
        *arrays, **named
            The declared inputs (see `inputs`): the first three by position, usually q, k, v, and
            any by name. All of one library, device and dtype; beside half-precision queries,
            keys and values the others may be float32.
        backend : str or tuple of str, optional
            Use only these, in this order of preference (larger groups of calls still go before
            smaller ones); what they do not take raises `UnsupportedError`.
        segment_ids : integer array (b, s), optional
            Packed sequences: tokens see only tokens of the same id. Equal ids stand together.
        lengths : integer array (b,), optional
            Valid tokens of each sequence; those behind are padding: ignored, and 0 in the output.
        key_mask : boolean array (b, s), optional
            False for keys that nobody may see, in the base and in every preconditioner.

        Raises
        ------
        TypeError, ValueError
            for bad input, naming it, before any work.
        """
        masks = (segment_ids, lengths, key_mask)
        if is_compiling():
            from precondattn.execution.torch_compile import captured_call

            names = (*self._positional[: len(arrays)], *named)
            tensors = (*arrays, *named.values())
            return captured_call(self._text, backend, names, tensors, masks)
        from precondattn.execution import run

        return run.call(self._mechanism, arrays, named, backend, *masks)

    def vjp(
        self,
        *arrays: Array,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        lengths: Any = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
        """The output and its pullback: from a cotangent of the output to all gradients, by name.

        It needs no automatic differentiation, and so works on every array library.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
        >>> out, pullback = pa.Lucid().vjp(q, k, v)
        >>> sorted(pullback(np.ones_like(out)))
        ['k', 'q', 'v']
        """
        from precondattn.execution import run

        masks = (segment_ids, lengths, key_mask)
        return run.vjp(self._mechanism, arrays, named, backend, *masks)

    def init_cache(
        self,
        *arrays: Array,
        capacity: int | None = None,
        key_mask: bool = False,
        **named: Array,
    ) -> Cache:
        """An empty cache of `capacity` tokens a sequence, for arrays like these.

        Of the arrays only shape, dtype and device matter; their time axis does not. With
        `key_mask` the cache remembers which keys `extend` was told to hide. A mechanism that keeps
        a state, and no tokens, takes any number of them and needs neither.
        """
        from precondattn.execution.empty_cache import empty_cache

        return empty_cache(self._mechanism, arrays, named, capacity, key_mask)

    def extend(
        self,
        cache: Cache,
        *arrays: Array,
        backend: BackendNames = None,
        lengths: Any = None,
        key_mask: Array | None = None,
        donate: bool = False,
        **named: Array,
    ) -> tuple[Array, Cache]:
        """The output for new tokens behind those in the cache, and the cache with them.

        One verb for prefill, chunked prefill and decoding: any number of new tokens, and any
        split of a sequence gives the output of the full call.

        Parameters
        ----------
        cache : Cache
            From `init_cache` or an earlier `extend`. It stays as it was, unless donated.
        lengths : integer array (b,), optional
            How many of the new tokens of each sequence count; the others are padding.
        key_mask : boolean array (b, t), optional
            False for new keys to hide, now and later; the cache must have been made for it.
        donate : bool
            Write into the cache's own buffers where the library can (NumPy, PyTorch, CuPy). The
            old cache is spent, and using it raises.

        Raises
        ------
        ValueError
            when the capacity is exceeded; under jit the sequences concerned come out as NaN.
        """
        if not isinstance(donate, bool):
            raise TypeError(f"{self}: donate must be true or false; found {donate!r}")
        masks = (lengths, key_mask)
        if is_compiling():
            # A graph has no place to write to; the compiler reuses what is no longer needed.
            from precondattn.execution.torch_compile import captured_extend

            keys = tuple(cache.store)
            names = (*self._positional[: len(arrays)], *named)
            out, length, *buffers = captured_extend(
                self._text,
                backend,
                cache.length,
                keys,
                tuple(cache.store.values()),
                names,
                (*arrays, *named.values()),
                masks,
            )
            if donate:
                cache.store.clear()
            return out, Cache(length, dict(zip(keys, buffers, strict=True)))
        from precondattn.execution import run

        mechanism = self._mechanism
        return run.extend(mechanism, cache, arrays, named, backend, *masks, donate=donate)

    def extend_vjp(
        self,
        cache: Cache,
        *arrays: Array,
        backend: BackendNames = None,
        lengths: Any = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> tuple[Array, Cache, ExtendPullback]:
        """`extend` with its pullback: gradients through the state that came and the one that goes.

        The pullback takes the cotangent of the output and, by name, those of the new cache's
        buffers (0 where there is none). It gives the gradients of the inputs by name, and those of
        the old cache's buffers. It needs no automatic differentiation; where a library has one,
        that of `extend` does the same. Mechanisms whose cache keeps tokens have no such pullback:
        there the `vjp` of a full call is meant. Until the pullback has run, the old cache must not
        be donated.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
        >>> linear = pa.Linear()
        >>> out, cache, pullback = linear.extend_vjp(linear.init_cache(q, k, v), q, k, v)
        >>> gradients, d_state = pullback(np.ones_like(out))
        >>> sorted(gradients), sorted(d_state)
        (['k', 'q', 'v'], ['linear.state(k, v)'])
        """
        from precondattn.execution import run

        return run.extend_vjp(self._mechanism, cache, arrays, named, backend, lengths, key_mask)

    def explain(
        self,
        *arrays: Array,
        verb: str = "forward",
        cache: Cache | None = None,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        lengths: Any = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> Explanation:
        """Which backend would run which piece of this call, and why not the others. `print` it.

        Parameters
        ----------
        verb : {"forward", "vjp"}
        cache : Cache, optional
            With a cache it is `extend` that is explained (with "vjp" `extend_vjp`), and the arrays
            are the new tokens.
        """
        from precondattn.execution import run

        masks = (segment_ids, lengths, key_mask)
        return run.explain(self._mechanism, verb, cache, arrays, named, backend, *masks)

    @property
    def _mechanism(self) -> Mechanism:
        return cast("Mechanism", self)
