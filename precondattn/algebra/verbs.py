"""The public methods of a mechanism: call, differentiate, extend a cache, explain the plan.

This module has the signatures and their documentation; `execution/` does the work. It is imported
by the first call, so that `import precondattn` is as fast as importing NumPy. No other module
imports a package above its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from precondattn.algebra.piece import BackendNames, ExtendPullback, Piece
from precondattn.arrays import Array, is_compiling
from precondattn.cache import Cache
from precondattn.cache.kept import without_kept
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
        prefix: Array | Sequence[int] | None = None,
        attn_mask: Array | None = None,
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
        prefix : integer array (b,), optional
            Every query sees the first `prefix` tokens of its sequence, beside those that causality
            and a window let it see: a prefix language model. A list or tuple of whole numbers, or
            an array. With `segment_ids` it is of each segment, and with `cu_seqlens` (n,). For
            `softmax` and what reads it; the others say why not.
        attn_mask : boolean array (b or 1, h or 1, t, s), optional
            True where a query may attend to a key, beside all other masks and causality, as a
            restriction of them. For `softmax` and what reads it. A query that may attend to nothing
            has the output 0.

        Raises
        ------
        TypeError, ValueError
            for bad input, naming it, before anything is computed.
        """
        masks = {"lengths": lengths, "key_mask": key_mask}
        masks |= {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        masks |= {"prefix": prefix, "attn_mask": attn_mask}
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
        prefix: Array | Sequence[int] | None = None,
        attn_mask: Array | None = None,
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
        masks |= {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        masks |= {"prefix": prefix, "attn_mask": attn_mask}
        return vjp(self, arrays, named, backend, masks)

    def init_cache(
        self,
        *arrays: Array,
        capacity: int | None = None,
        key_mask: bool = False,
        states: Mapping[str, Array] | None = None,
        sequences: int | None = None,
        **named: Array,
    ) -> Cache:
        """An empty cache for `capacity` tokens per sequence, for arrays like these.

        Only shape, dtype and device of the arrays matter; the length of their time axis does not.
        A mechanism whose cache is a state, without tokens, has no limit on their number and needs
        neither `capacity` nor `key_mask`.

        Parameters
        ----------
        capacity : int, optional
            The greatest number of tokens of a sequence, 1 or above.
        key_mask : bool
            Whether the cache stores the key masks passed to `extend`.
        states : dict of arrays, optional
            The states to begin from, by the names of `cache.states`, such as
            `{"S": S0}` with S0 of shape (b, heads, d, e). They have the inputs' dtype, or float32
            where that is half precision. They are copied, and gradients pass through them. States
            that are not named are empty; those of one piece, as S and z, are given together.
        sequences : int, optional
            The number of sequences, where it is not that of the arrays: packed sequences of
            `extend(..., cu_seqlens=...)` have one row together.

        Raises
        ------
        TypeError, ValueError
            naming the argument.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))
        >>> linear = pa.Linear()
        >>> _, prompt = linear.extend(linear.init_cache(q, k, v), q, k, v)
        >>> cache = linear.init_cache(q, k, v, states={"S": prompt.states["S"]})
        >>> bool((cache.states["S"] == prompt.states["S"]).all())
        True
        """
        from precondattn.execution.empty_cache import empty_cache

        return empty_cache(self, arrays, named, capacity, key_mask, states, sequences)

    def extend(
        self,
        cache: Cache,
        *arrays: Array,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | Sequence[int] | None = None,
        lengths: Array | Sequence[int] | None = None,
        key_mask: Array | None = None,
        prefix: Array | Sequence[int] | None = None,
        attn_mask: Array | None = None,
        donate: bool = False,
        keep: int = 0,
        states_every: int | None = None,
        **named: Array,
    ) -> tuple[Array, Cache]:
        """The output for new tokens after those in the cache, and the cache extended by them.

        One method for prefill, chunked prefill and decoding. It accepts any number of new tokens,
        and any split of a sequence gives the output of the full call.

        Parameters
        ----------
        cache : Cache
            From `init_cache` or an earlier `extend`. It is not modified unless donated.
        cu_seqlens : integer array (n + 1,), optional
            New tokens of n sequences in one row, b = 1: those of sequence i of the cache are from
            `cu_seqlens[i]` to before `cu_seqlens[i + 1]`; there may be none. The cache is of n
            sequences, from `init_cache(..., sequences=n)`, and so is the new one. As in a call,
            but it has to be readable: under `jit` a list or a NumPy array.
        segment_ids : integer array (b, t), optional
            The same, for any number of rows: each run of equal ids is a sequence of the cache, row
            by row.
        lengths : integer array (b,), optional
            The number of valid new tokens of each sequence; the others are padding.
        key_mask : boolean array (b, t), optional
            False for new keys that are masked in this call and all later ones. The cache must have
            been created with `key_mask=True`, unless it is a state.
        prefix : integer array (b,), optional
            As in a full call, counted from the first token of a sequence. The whole prefix is among
            the new tokens of an empty cache. Later steps see it in any case, and need not name it.
            The cache of a window keeps no prefix, and refuses one.
        attn_mask : boolean array (b or 1, h or 1, t, s), optional
            True where a new token may attend to a key, as in a full call and for this call only.
            Column j is the token at position j of its sequence, cached or new: s is the number of
            both in the longest sequence, or the capacity of the cache. The cache of a window
            refuses it.
        donate : bool
            Write into the cache's own buffers where the library can (NumPy, PyTorch, CuPy). The
            old cache must not be used again; doing so raises.
        keep : int
            The new cache keeps the states before each of the last `keep` new tokens of each
            sequence, so that `crop` can take these tokens back: rejected drafts.
        states_every : int, optional
            The new cache keeps the states of each multiple of so many tokens, counted from the
            beginning of the sequence: `cache.checkpoints` has these lengths, and `crop` goes to
            one of them.

            With both, what computes states does it from one to the next, and other pieces at
            once. Kept states take the memory of as many states more. Gradients pass through them.
            The next `extend` drops them, and so does `crop`. A cache without states can be cropped
            to any length, and keeps nothing more. Rewritten rows and windows can not be kept.

        Raises
        ------
        ValueError
            when the capacity is exceeded; under jit the output of these sequences is NaN.
        """
        if not isinstance(donate, bool):
            raise TypeError(f"{self}: donate must be true or false; found {donate!r}")
        whole, cache = cache, without_kept(cache) if isinstance(cache, Cache) else cache
        masks, is_packed = _masks_of_extension(segment_ids, cu_seqlens, lengths, key_mask)
        masks |= {"prefix": prefix, "attn_mask": attn_mask}
        keeping = None
        if keep != 0 or type(keep) is not int or states_every is not None:
            from precondattn.execution.keeping import Keeping

            keeping = Keeping.read(str(self), keep, states_every)
        if is_compiling():
            if keeping is not None:
                raise ValueError(
                    f"{self}: code that torch.compile reads keeps no earlier states; extend "
                    f"outside it, or without keep and states_every"
                )
            # A graph does not write in place; the compiler reuses memory that is free.
            length, store = cache.length, dict(cache.store)
            captured = self._name, length, store, arrays, named, backend, masks
            if is_packed:
                results = in_graph().captured_extend_packed(cache.kinds, *captured)
            else:
                results = in_graph().captured_extend(*captured)
            out, length, *buffers = results
            if donate:
                whole.store.clear()
            return out, holding(cache, length, dict(zip(store, buffers, strict=True)))
        from precondattn.execution import run

        extend = run.extend_packed if is_packed else run.extend
        given = self, cache, arrays, named, backend, masks
        result = extend(*given, donate=donate, keeping=keeping)
        if donate:
            whole.store.clear()
        return result

    def extend_vjp(
        self,
        cache: Cache,
        *arrays: Array,
        backend: BackendNames = None,
        segment_ids: Array | None = None,
        cu_seqlens: Array | Sequence[int] | None = None,
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
        from precondattn.execution import run

        masks, is_packed = _masks_of_extension(segment_ids, cu_seqlens, lengths, key_mask)
        cache = without_kept(cache) if isinstance(cache, Cache) else cache
        extend_vjp = run.extend_vjp_packed if is_packed else run.extend_vjp
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
        prefix: Array | Sequence[int] | None = None,
        attn_mask: Array | None = None,
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

        cache = without_kept(cache) if isinstance(cache, Cache) else cache
        masks = {"lengths": lengths, "key_mask": key_mask}
        masks |= {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        masks |= {"prefix": prefix, "attn_mask": attn_mask}
        return explain(self, verb, cache, arrays, named, backend, masks)


def _masks_of_extension(
    segment_ids: Array | None,
    cu_seqlens: Array | Sequence[int] | None,
    lengths: Array | Sequence[int] | None,
    key_mask: Array | None,
) -> tuple[dict[str, Array], bool]:
    """The masks by name, and whether the new tokens are those of packed sequences."""
    masks = {"lengths": lengths, "key_mask": key_mask}
    if segment_ids is None and cu_seqlens is None:
        return masks, False
    return {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, **masks}, True
