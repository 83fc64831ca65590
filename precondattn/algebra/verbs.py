"""The public methods of a mechanism: `__call__`, `vjp`, `init_cache`, `extend`, `explain`.

This module has their signatures and documentation, and `execution/` implements them. The first call
imports `execution/`, so that `import precondattn` is as fast as importing NumPy. No other module
imports a package above its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from precondattn import frameworks
from precondattn.algebra.call import Call, Keeping
from precondattn.algebra.piece import BackendNames, ExtendPullback, Piece
from precondattn.arrays import Array, Arrays, ByName, is_compiling, library_of
from precondattn.cache import Cache
from precondattn.cache.conversion import ordinary, with_writable_buffers
from precondattn.cache.kept import without_kept
from precondattn.cache.kinds import empty_if_donated, holding
from precondattn.given import Given

if TYPE_CHECKING:
    from precondattn.algebra.registry import AnyMechanism
    from precondattn.dispatch.explanation import Explanation


class _SignatureOfCall:
    """The signature that `inspect.signature` finds: of a mechanism's call, or of a constructor."""

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
        """The output of the mechanism, of shape (b, t, h, e) and v's dtype.

        PyTorch and JAX can differentiate it.

        Parameters
        ----------
        *arrays, **named
            The declared inputs (see `inputs`). The first three, usually q (b, t, h, d), k (b, s, n,
            d) and v (b, s, n, e), may be given by position, and any input by name. All inputs must
            have the same library, device and dtype. If queries, keys and values are in half
            precision, the other inputs may be in float32.
        backend : str or tuple of str, optional
            The only backends to use, in order of preference. A backend for a larger group of leaf
            calls is still preferred to one for a smaller group. If none of them supports a part of
            the call, an `UnsupportedError` is raised.
        segment_ids : integer array (b, s), optional
            The ids of packed sequences: tokens attend only to tokens with the same id. Equal ids
            must be contiguous.
        cu_seqlens : integer array (n + 1,), optional
            The borders of packed sequences as in flash-attention, for b = 1: the tokens
            of sequence i start at `cu_seqlens[i]` and end before `cu_seqlens[i + 1]`, and the first
            entry is 0. Tokens after the last sequence are padding, like those after `lengths`. A
            list or tuple of integers, a NumPy array, or an array of the inputs' library on their
            device or on the CPU. It is read without waiting for a device if it is on the host.
        lengths : integer array (b,), optional
            The number of valid tokens of each sequence. The tokens after them are padding: they are
            ignored, and their output is 0.
        key_mask : boolean array (b, s), optional
            False for masked keys, which neither the base nor a preconditioner reads.
        prefix : integer array (b,), optional
            The length of a prefix that every query of the sequence sees, in addition to the tokens
            that causality and a window allow, as in a prefix language model. A list or tuple of
            integers, or an array. With `segment_ids` each segment has a prefix of this length, and
            with `cu_seqlens` the shape is (n,). For `softmax` and mechanisms around it; others
            refuse it with the reason.
        attn_mask : boolean array (b or 1, h or 1, t, s), optional
            True where a query may attend to a key. It restricts causality and all other masks
            further. For `softmax` and mechanisms around it. A query that may attend to no key has
            the output 0.

        Raises
        ------
        TypeError, ValueError
            for invalid input, before anything is computed; the message names the argument.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
        >>> pa.Lucid()(q, k, v, lengths=[3]).shape
        (1, 5, 2, 4)
        """
        masks = {"lengths": lengths, "key_mask": key_mask, "segment_ids": segment_ids}
        masks |= {"cu_seqlens": cu_seqlens, "prefix": prefix, "attn_mask": attn_mask}
        if is_compiling():
            return frameworks.in_graph.captured_call(self._name, arrays, named, masks, backend)
        from precondattn.execution.run import forward

        return forward(Call("forward", self, arrays, named, masks, backend))

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
        """The output, and the pullback, which maps a cotangent of the output to all gradients.

        The pullback returns a dict of gradients by input name. It does not use automatic
        differentiation, and so works on every array library. The arguments are those of a call.

        The output and the gradients may be written to. Inputs and masks are not copied, and must
        not be changed before the pullback has run. If they are, PyTorch raises a RuntimeError, but
        with NumPy and CuPy the gradient is wrong without an error.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
        >>> out, pullback = pa.Lucid().vjp(q, k, v)
        >>> sorted(pullback(np.ones_like(out)))
        ['k', 'q', 'v']
        """
        from precondattn.execution.run import vjp

        masks = {"lengths": lengths, "key_mask": key_mask, "segment_ids": segment_ids}
        masks |= {"cu_seqlens": cu_seqlens, "prefix": prefix, "attn_mask": attn_mask}
        return vjp(Call("vjp", self, arrays, named, masks, backend))

    def init_cache(
        self,
        *arrays: Array,
        capacity: int | None = None,
        key_mask: bool = False,
        states: ByName | None = None,
        sequences: int | None = None,
        **named: Array,
    ) -> Cache:
        """An empty cache for `capacity` tokens per sequence, for inputs like these arrays.

        Only the shapes, dtype and device of the arrays matter, and not the length of the time axis.
        A mechanism whose cache consists of states has no limit on the number of tokens, and needs
        neither `capacity` nor `key_mask`.

        Parameters
        ----------
        capacity : int, optional
            The largest number of tokens of a sequence, 1 or above.
        key_mask : bool
            Whether the cache stores the key masks that are passed to `extend`.
        states : dict of arrays, optional
            The initial states by the names of `cache.states`, such as `{"S": S0}` with S0 (b,
            heads, d, e), in the inputs' dtype, or in float32 if that is half precision. They are
            copied, and gradients flow through them. Other states are empty. The states of one leaf,
            such as S and z, must be given together.
        sequences : int, optional
            The number of sequences, if it is not that of the arrays: the packed sequences of
            `extend(..., cu_seqlens=...)` are in one row.

        Raises
        ------
        TypeError, ValueError
            for invalid input; the message names the argument.

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
        """The output for new tokens that follow the tokens in the cache, and the extended cache.

        The method serves prefill, chunked prefill and decoding. It accepts any number of new
        tokens. However a sequence is split, the outputs are those of the full call.

        Parameters
        ----------
        cache : Cache
            A cache from `init_cache` or an earlier `extend`. It is not modified unless donated.
        cu_seqlens : integer array (n + 1,), optional
            The borders of the new tokens of n sequences in one row (b = 1): the new tokens of
            sequence i of the cache start at `cu_seqlens[i]` and end before `cu_seqlens[i + 1]`;
            there may be none. The cache has n sequences, from `init_cache(..., sequences=n)`. As in
            a call, but the entries must be readable: under `jit` give a list or a NumPy array.
        segment_ids : integer array (b, t), optional
            The ids of packed sequences in any number of rows: each run of equal ids is a sequence
            of the cache, row by row.
        lengths : integer array (b,), optional
            The number of valid new tokens of each sequence. The others are padding.
        key_mask : boolean array (b, t), optional
            False for new keys that are masked in this call and all later ones. The cache must have
            been created with `key_mask=True`, unless it consists of states.
        prefix : integer array (b,), optional
            The prefix length as in a full call, counted from the first token of a sequence. The
            whole prefix must be among the new tokens of an empty cache. Later steps see it without
            this argument. The cache of a window does not support it.
        attn_mask : boolean array (b or 1, h or 1, t, s), optional
            True where a new token may attend to a key, for this call only. Column j is the token at
            position j of its sequence, cached or new, so s is the number of cached and new tokens
            of the longest sequence, or the capacity of the cache. The cache of a window does not
            support it.
        donate : bool
            Write into the cache's own buffers if the library can (NumPy, PyTorch, CuPy). The old
            cache must not be used again; using it raises an error, also if this call has failed.
        keep : int
            The number of last new tokens of each sequence before which the new cache keeps the
            states, so that `crop` can remove these tokens, for example rejected drafts.
        states_every : int, optional
            The distance in tokens, counted from the beginning of the sequence, at which the new
            cache keeps states. `cache.checkpoints` has these lengths, and `crop` can go back to
            them.

        Raises
        ------
        ValueError
            if the capacity is exceeded; under `jit` the output of these sequences is NaN.

        Notes
        -----
        With `keep` or `states_every`, leaves with states run from one kept state to the next, and
        other leaves run once. Each kept state takes the memory of a state. Gradients flow through
        kept states. The next `extend` drops them, and so does `crop`. A cache without states can be
        cropped to any length, and keeps nothing. Caches with rewritten rows, and caches of windows,
        support neither.

        Examples
        --------
        >>> import numpy as np, precondattn as pa
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
        >>> lucid = pa.Lucid()
        >>> cache = lucid.init_cache(q, k, v, capacity=8)
        >>> prompt, cache = lucid.extend(cache, q[:, :4], k[:, :4], v[:, :4])
        >>> token, cache = lucid.extend(cache, q[:, 4:], k[:, 4:], v[:, 4:])
        >>> bool(np.allclose(np.concatenate([prompt, token], axis=1), lucid(q, k, v)))
        True
        """
        if not isinstance(donate, bool):
            raise TypeError(f"{self}: donate must be true or false; found {donate!r}")
        is_captured = is_compiling()
        whole, cache = cache, _read(cache, arrays, named, is_captured=is_captured)
        masks = {"lengths": lengths, "key_mask": key_mask, "prefix": prefix, "attn_mask": attn_mask}
        is_packed = segment_ids is not None or cu_seqlens is not None
        if is_packed:
            masks |= {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        keeping = None
        if keep != 0 or type(keep) is not int or states_every is not None:
            keeping = Keeping.read(str(self), keep, states_every)
        if is_captured:
            if keeping is not None:
                raise ValueError(
                    f"{self}: code that torch.compile reads keeps no earlier states; extend "
                    f"outside it, or without keep and states_every"
                )
            # A graph does not write in place; the compiler reuses memory itself.
            length, store = cache.length, dict(cache.store)
            out, length, *buffers = frameworks.in_graph.captured_extend(
                cache.kinds, length, store, self._name, arrays, named, masks, backend
            )
            if donate:
                whole.store.clear()
            return out, holding(cache, length, dict(zip(store, buffers, strict=True)))
        from precondattn.execution import run

        cache = with_writable_buffers(cache) if donate and isinstance(cache, Cache) else cache
        extend = run.extend_packed if is_packed else run.extend
        try:
            return extend(
                Call("extend", self, arrays, named, masks, backend, cache, donate, keeping)
            )
        finally:
            if whole is not cache:
                empty_if_donated(whole, cache)

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
        """The results of `extend`, and its pullback, with gradients of the old and the new states.

        The pullback takes the cotangent of the output and a dict with the cotangents of the new
        cache's buffers (missing ones are 0). It returns a dict with the gradients of the inputs,
        and a dict with the gradients of the old cache's buffers. It does not use automatic
        differentiation; differentiating `extend` in PyTorch or JAX gives the same gradients.
        Mechanisms whose cache has tokens do not support it: use `vjp` of a full call. As in `vjp`,
        inputs, masks and the old cache must not be changed before the pullback has run. Donating
        the old cache before that is an error in libraries that overwrite it.

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

        masks = {"lengths": lengths, "key_mask": key_mask}
        is_packed = segment_ids is not None or cu_seqlens is not None
        if is_packed:
            masks |= {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        cache = _read(cache, arrays, named, is_captured=is_compiling())
        extend_vjp = run.extend_vjp_packed if is_packed else run.extend_vjp
        return extend_vjp(Call("extend_vjp", self, arrays, named, masks, backend, cache))

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
        """The plan of this call: which backend would run which piece, and why others would not.

        `print` shows it. The other arguments are those of the explained call.

        Parameters
        ----------
        verb : {"forward", "vjp"}
        cache : Cache, optional
            If a cache is given, `extend` is explained (with "vjp", `extend_vjp`), and the arrays
            are the new tokens.
        """
        from precondattn.execution.run import explain

        cache = _read(cache, arrays, named, is_captured=is_compiling())
        masks = {"lengths": lengths, "key_mask": key_mask, "segment_ids": segment_ids}
        masks |= {"cu_seqlens": cu_seqlens, "prefix": prefix, "attn_mask": attn_mask}
        return explain(Call(verb, self, arrays, named, masks, backend, cache))


def _read(cache: Given, arrays: tuple[Array, ...], named: Arrays, *, is_captured: bool) -> Given:
    """The cache without kept states, in the library of the inputs where that is possible."""
    if not isinstance(cache, Cache):
        return cache
    cache = without_kept(cache)
    if library_of(cache.length) == "torch":
        # Each call makes a new length, also for the buffers that it does not copy.
        is_kept = is_captured or not cache.length.is_inference()
        return cache if is_kept else ordinary(cache)
    like = next(iter((*arrays, *named.values())), None)
    return frameworks.of(like).adopted_cache(cache, like)
