"""What can be done with a mechanism: call it, differentiate it, cache it, ask how it would run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from precondattn.arrays import Array, is_compiling

if TYPE_CHECKING:
    from precondattn.backend import Request
    from precondattn.cache import Cache
    from precondattn.call import BoundCall
    from precondattn.dispatch import Plan
    from precondattn.explanation import Explanation
    from precondattn.mechanism import Mechanism

CALL_OPTIONS = ("segment_ids", "lengths", "key_mask", "backend")
"""Keywords of a call that are not inputs."""

BackendNames = str | tuple[str, ...] | None
ExtendPullback = Callable[..., tuple[dict[str, Array], dict[str, Array]]]


class Verbs:
    """The public methods of every mechanism.

    The modules that do the work are imported by the first call, so that `import precondattn`
    stays as quick as importing NumPy.
    """

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
            from precondattn.bridges.torch_compile import captured_call

            names = (*self._positional[: len(arrays)], *named)
            tensors = (*arrays, *named.values())
            return captured_call(self._text, backend, names, tensors, masks)
        return call_now(self._mechanism, arrays, named, backend, *masks)

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
        from precondattn import call, execution

        bound = call.bind(
            self._mechanism,
            arrays,
            named,
            segment_ids=segment_ids,
            lengths=lengths,
            key_mask=key_mask,
        )
        out, pull = execution.vjp(
            _plan(self._mechanism, _request("vjp", bound), bound, backend), bound
        )

        def pullback(cotangent: Array) -> dict[str, Array]:
            call.check_cotangent(str(self), "the cotangent", cotangent, "the output", out)
            frame = bound.frame
            return call.zero_padding(
                pull(cotangent), self._mechanism.inputs, frame.q_valid, frame.k_valid
            )

        return out, pullback

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
        from precondattn import cache as caching
        from precondattn import call
        from precondattn.arrays import namespace, placement
        from precondattn.declaration import FIXED, ShapeError

        call.check_cacheable(self._mechanism)
        has_tokens = call.keeps_tokens(self._mechanism)
        if capacity is None and has_tokens:
            raise TypeError(
                f"{self}: missing capacity, the number of tokens that the cache has a place for"
            )
        is_whole = isinstance(capacity, int) and not isinstance(capacity, bool)
        if capacity is not None and not (is_whole and capacity >= 1):
            raise ValueError(
                f"{self}: capacity must be a whole number, 1 or above; found {capacity!r}"
            )
        if not isinstance(key_mask, bool):
            raise TypeError(
                f"{self}: key_mask must be true or false, whether the cache keeps one; "
                f"found {type(key_mask).__name__}"
            )
        like, sizes = call.bind_shapes(self._mechanism, arrays, named)
        sizes["c"] = capacity or 0
        store: dict[str, Array] = {}
        for name, (slot, pattern) in self._mechanism.program.slots.items():
            unknown = set(pattern.letters.replace(FIXED, "")) - set(sizes)
            if unknown:
                declared = self._mechanism.inputs.items()
                tell = [n for n, p in declared if unknown & set(p.letters)]
                raise ShapeError(
                    f"{self}: init_cache can not tell the size of {', '.join(sorted(unknown))} "
                    f"from these inputs; pass {', '.join(tell)} too"
                )
            store[name] = caching.new_buffer(slot, pattern.shape(sizes), like)
        xp = namespace(like)
        if key_mask and has_tokens:
            shape = (sizes["b"], sizes["c"])
            store[caching.KEY_MASK] = xp.zeros(shape, dtype=xp.bool, **placement(like))
        return caching.Cache(xp.zeros((sizes["b"],), dtype=xp.int32, **placement(like)), store)

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
        if "segment_ids" in named:
            raise TypeError(
                f"{self}: segment_ids belong to a full call; each sequence has a cache of its own"
            )
        if not isinstance(donate, bool):
            raise TypeError(f"{self}: donate must be true or false; found {donate!r}")
        masks = (lengths, key_mask)
        if is_compiling():
            # A graph has no place to write to; the compiler reuses what is no longer needed.
            from precondattn.bridges.torch_compile import captured_extend
            from precondattn.cache import Cache

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
        return extend_now(self._mechanism, cache, arrays, named, backend, *masks, donate=donate)

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
        from precondattn import call, execution
        from precondattn.arrays import namespace

        if "segment_ids" in named:
            raise TypeError(
                f"{self}: segment_ids belong to a full call; each sequence has a cache of its own"
            )
        if "donate" in named:
            raise TypeError(f"{self}: extend_vjp does not donate: the pullback needs the old cache")
        call.check_has_states(self._mechanism)
        bound = call.bind_extension(
            self._mechanism, cache, arrays, named, lengths=lengths, key_mask=key_mask
        )
        plan = _plan(self._mechanism, _request("extend_vjp", bound), bound, backend)
        count = call.new_token_count(bound, cache)
        out, extended, pull = execution.extend_vjp(plan, bound, cache, count)
        past = dict(extended.store)

        def pullback(
            cotangent: Array, d_store: Mapping[str, Array] | Cache | None = None
        ) -> tuple[dict[str, Array], dict[str, Array]]:
            given = _cotangents_of_buffers(str(self), d_store)
            call.check_cotangent(str(self), "the cotangent", cotangent, "the output", out)
            for name, array in given.items():
                if name not in past:
                    raise ValueError(
                        f"{self}: the cache has no buffer {name!r}; it has {', '.join(past)}"
                    )
                what = f"the cotangent of {name!r}"
                call.check_cotangent(str(self), what, array, "that buffer", past[name])
            zeros = {n: namespace(a).zeros_like(a) for n, a in past.items() if n not in given}
            gradients, d_past = pull(cotangent, {**given, **zeros})
            frame = bound.frame
            new_valid = None if frame.k_valid is None else frame.k_valid[:, -bound.sizes["t"] :]
            declared = self._mechanism.inputs
            return call.zero_padding(gradients, declared, frame.q_valid, new_valid), d_past

        return out, extended, pullback

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
        from precondattn import call
        from precondattn.discovery import discover
        from precondattn.explanation import Explanation

        if verb not in ("forward", "vjp"):
            raise ValueError(
                f"{self}: verb must be 'forward' or 'vjp' (for extend, give the cache); "
                f"found {verb!r}"
            )
        if cache is not None and segment_ids is not None:
            raise ValueError(f"{self}: a cache is for extend, which has no segment_ids")
        if cache is None:
            bound = call.bind(
                self._mechanism,
                arrays,
                named,
                segment_ids=segment_ids,
                lengths=lengths,
                key_mask=key_mask,
            )
        else:
            if verb == "vjp":
                call.check_has_states(self._mechanism)
            verb = "extend_vjp" if verb == "vjp" else "extend"
            bound = call.bind_extension(
                self._mechanism, cache, arrays, named, lengths=lengths, key_mask=key_mask
            )
        request = _request(verb, bound)
        plan = _plan(self._mechanism, request, bound, backend)
        return Explanation(str(self), self._mechanism.program, request, plan, discover())

    @property
    def _mechanism(self) -> Mechanism:
        return cast("Mechanism", self)


def _cotangents_of_buffers(owner: str, given: Any) -> dict[str, Array]:
    from precondattn.cache import Cache

    given = given.store if isinstance(given, Cache) else given
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"{owner}: the cotangents of buffers come as a dict by their names, or as a Cache of "
            f"them; found {type(given).__name__}"
        )
    return dict(given or {})


def call_now(
    mechanism: Mechanism,
    arrays: tuple[Array, ...],
    named: dict[str, Array],
    backend: BackendNames,
    segment_ids: Array | None,
    lengths: Any,
    key_mask: Array | None,
) -> Array:
    """A full call."""
    from precondattn import call, execution

    bound = call.bind(
        mechanism, arrays, named, segment_ids=segment_ids, lengths=lengths, key_mask=key_mask
    )
    plan = _plan(mechanism, _request("forward", bound), bound, backend)
    return execution.forward(plan, bound)


def extend_now(
    mechanism: Mechanism,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: dict[str, Array],
    backend: BackendNames,
    lengths: Any,
    key_mask: Array | None,
    *,
    donate: bool,
) -> tuple[Array, Cache]:
    """An extension of a cache."""
    from precondattn import call, execution

    bound = call.bind_extension(mechanism, cache, arrays, named, lengths=lengths, key_mask=key_mask)
    request = _request("extend", bound, tuple(cache.store.values()))
    plan = _plan(mechanism, request, bound, backend)
    if donate and bound.library == "torch" and request.differentiated:
        raise ValueError(
            f"{mechanism}: donate=True writes in place, which leaves nothing to differentiate; "
            f"call it under torch.no_grad(), or without donate"
        )
    count = call.new_token_count(bound, cache)
    return execution.extend(plan, bound, cache, count, donate=donate)


def _request(verb: str, bound: BoundCall, past: tuple[Array, ...] = ()) -> Request:
    from precondattn.arrays import device_of, is_traced, transforms_of, wants_gradient
    from precondattn.backend import Request

    arrays = bound.inputs
    first = next(iter(arrays.values()))
    differentiated = wants_gradient(*arrays.values(), *past)
    transforms = transforms_of(*arrays.values(), *past)
    return Request(
        verb="vjp" if verb == "forward" and differentiated else verb,
        library=bound.library,
        device=device_of(first),
        dtype=bound.dtype,
        shapes=tuple((name, tuple(map(int, array.shape))) for name, array in arrays.items()),
        masks=bound.masks,
        differentiated=differentiated,
        transformed="grad" in transforms,
        mapped="vmap" in transforms,
        traced=bound.library == "torch" and is_traced(first) and not transforms,
    )


def _plan(mechanism: Mechanism, request: Request, bound: BoundCall, backend: BackendNames) -> Plan:
    from precondattn.discovery import allowed_backends
    from precondattn.dispatch import make_plan

    return make_plan(mechanism, request, bound.sizes.get("c"), allowed_backends(backend))
