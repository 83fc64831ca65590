"""The public methods of a mechanism: call, differentiate, extend a cache, explain the plan.

This module has the signatures and their documentation; `execution/` does the work. It is imported
by the first call, so that `import precondattn` is as fast as importing NumPy. No other module
imports a package above its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from precondattn.algebra.piece import BackendNames, ExtendPullback, Piece
from precondattn.arrays import Array, is_compiling
from precondattn.cache import Cache
from precondattn.cache.kinds import holding

if TYPE_CHECKING:
    from precondattn.algebra.registry import AnyMechanism
    from precondattn.dispatch.explanation import Explanation


def in_graph() -> ModuleType:
    """The functions that code compiled by PyTorch calls instead."""
    from precondattn.execution.torch import compile as functions

    return functions


class _SignatureOfCall:
    """What `inspect.signature` finds: a mechanism's inputs and masks, or a class's constructor."""

    def __get__(self, mechanism: AnyMechanism | None, cls: type[AnyMechanism]) -> inspect.Signature:
        if mechanism is None:
            constructor = inspect.signature(cls.__init__)
            return constructor.replace(parameters=[*constructor.parameters.values()][1:])
        from precondattn.execution.parameters_of_calls import signature_of_call

        return signature_of_call(mechanism)


class Verbs(Piece):
    """The public methods of every mechanism."""

    __signature__ = _SignatureOfCall()
    _text: str
    """The mechanism's expression."""

    def __call__(
        self,
        *arrays: Array,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | Sequence[int] | None = None,
        lengths: Array | Sequence[int] | None = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> Array:
        """The output, of shape (b, t, h, e) and v's dtype. Differentiable in PyTorch and JAX.

        Parameters
        ----------
        *arrays, **named
            The declared inputs (see `inputs`): the first three by position, usually q, k, v, and
            any by name. All inputs have one library, device and dtype, with one exception: if
            queries, keys and values are in half precision, the other inputs may be float32.
        backend : str or tuple of str, optional
            Use only these backends, in this order of preference (larger groups of calls still
            come before smaller ones). Work that none of them supports raises `UnsupportedError`.
        segment_ids : integer array (b, s), optional
            Packed sequences: tokens attend only to tokens of the same id. Equal ids must be
            contiguous.
        cu_seqlens : integer array (n + 1,), optional
            The same, as flash-attention takes it, for b = 1: sequence i has the tokens from
            `cu_seqlens[i]` to before `cu_seqlens[i + 1]`, and the first starts at 0. Tokens after
            the last are padding, as those after `lengths`. A list or tuple of whole numbers, a
            NumPy array, or an array of the inputs' library, on their device or on the CPU. One on
            the host is read without waiting for a device.
        lengths : integer array (b,), optional
            The number of valid tokens of each sequence. The tokens after them are padding: they
            are ignored, and their output is 0.
        key_mask : boolean array (b, s), optional
            False for masked keys, which neither the base nor any preconditioner reads.

        Raises
        ------
        TypeError, ValueError
            for bad input, naming it, before anything is computed.
        """
        masks = {"lengths": lengths, "key_mask": key_mask}
        masks = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, **masks}
        if is_compiling():
            return in_graph().captured_call(self._name, arrays, named, backend, masks)
        from precondattn.execution.run import call

        return call(self, arrays, named, backend, masks)

    def vjp(
        self,
        *arrays: Array,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | Sequence[int] | None = None,
        lengths: Array | Sequence[int] | None = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
        """The output and its pullback, which maps a cotangent of the output to all gradients.

        The gradients are a dict by input name. No automatic differentiation is used, so this
        works on every array library.

        The output and the gradients may be written to. Inputs and masks are held by reference and
        must not change before the pullback has run: in PyTorch that raises a RuntimeError, but
        NumPy and CuPy do not tell, and the gradient is wrong.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
        >>> out, pullback = pa.Lucid().vjp(q, k, v)
        >>> sorted(pullback(np.ones_like(out)))
        ['k', 'q', 'v']
        """
        from precondattn.execution.run import vjp

        masks = {"lengths": lengths, "key_mask": key_mask}
        masks = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, **masks}
        return vjp(self, arrays, named, backend, masks)

    def init_cache(
        self, *arrays: Array, capacity: int | None = None, key_mask: bool = False, **named: Array
    ) -> Cache:
        """An empty cache for `capacity` tokens per sequence, for arrays like these.

        Only shape, dtype and device of the arrays matter; the length of their time axis does not.
        With `key_mask` the cache stores the key masks passed to `extend`. A mechanism whose cache
        is a state, without tokens, has no limit on their number and needs neither.
        """
        from precondattn.execution.empty_cache import empty_cache

        return empty_cache(self, arrays, named, capacity, key_mask)

    def extend(
        self,
        cache: Cache,
        *arrays: Array,
        backend: BackendNames = None,
        lengths: Array | Sequence[int] | None = None,
        key_mask: Array | None = None,
        donate: bool = False,
        **named: Array,
    ) -> tuple[Array, Cache]:
        """The output for new tokens after those in the cache, and the cache extended by them.

        One method for prefill, chunked prefill and decoding. It accepts any number of new tokens,
        and any split of a sequence gives the output of the full call.

        Parameters
        ----------
        cache : Cache
            From `init_cache` or an earlier `extend`. It is not modified unless donated.
        lengths : integer array (b,), optional
            The number of valid new tokens of each sequence; the others are padding.
        key_mask : boolean array (b, t), optional
            False for new keys that are masked in this call and all later ones. The cache must have
            been created with `key_mask=True`, unless it is a state.
        donate : bool
            Write into the cache's own buffers where the library can (NumPy, PyTorch, CuPy). The
            old cache must not be used again; doing so raises.

        Raises
        ------
        ValueError
            when the capacity is exceeded; under jit the output of these sequences is NaN.
        """
        if not isinstance(donate, bool):
            raise TypeError(f"{self}: donate must be true or false; found {donate!r}")
        masks = {"lengths": lengths, "key_mask": key_mask}
        if is_compiling():
            # A graph does not write in place; the compiler reuses memory that is free.
            length, store = cache.length, dict(cache.store)
            given = self._name, length, store, arrays, named, backend, masks
            out, length, *buffers = in_graph().captured_extend(*given)
            if donate:
                cache.store.clear()
            return out, holding(cache, length, dict(zip(store, buffers, strict=True)))
        from precondattn.execution.run import extend

        return extend(self, cache, arrays, named, backend, masks, donate=donate)

    def extend_vjp(
        self,
        cache: Cache,
        *arrays: Array,
        backend: BackendNames = None,
        lengths: Array | Sequence[int] | None = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> tuple[Array, Cache, ExtendPullback]:
        """`extend` with its pullback: gradients through the old and the new state.

        The pullback takes the cotangent of the output and, by name, those of the new cache's
        buffers (a missing one is 0). It returns the gradients of the inputs by name, and those of
        the old cache's buffers. No automatic differentiation is used; where a library has it,
        differentiating `extend` gives the same. Mechanisms whose cache stores tokens have no such
        pullback: use the `vjp` of a full call. As in `vjp`, inputs, masks and the old cache must
        not change before the pullback has run; an old cache that is donated is an error where
        donating overwrites it.

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
        from precondattn.execution.run import extend_vjp

        masks = {"lengths": lengths, "key_mask": key_mask}
        return extend_vjp(self, cache, arrays, named, backend, masks)

    def explain(
        self,
        *arrays: Array,
        verb: str = "forward",
        cache: Cache | None = None,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | Sequence[int] | None = None,
        lengths: Array | Sequence[int] | None = None,
        key_mask: Array | None = None,
        **named: Array,
    ) -> Explanation:
        """Which backend would run which piece of this call, and why not the others. `print` it.

        Parameters
        ----------
        verb : {"forward", "vjp"}
        cache : Cache, optional
            With a cache, `extend` is explained (with "vjp", `extend_vjp`), and the arrays are the
            new tokens.
        """
        from precondattn.execution.run import explain

        masks = {"lengths": lengths, "key_mask": key_mask}
        masks = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, **masks}
        return explain(self, verb, cache, arrays, named, backend, masks)
