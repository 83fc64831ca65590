"""A computation that can be timed: one mechanism, on one of our backends or by a peer.

It can run forward, forward and backward, and, if supported, one step of decoding. Results have the
same names for all implementations, so that they can be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.backend import UnsupportedError
from precondattn.cache import Cache
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.bench.paired import Run
from precondattn_conformance.inputs import slice_tokens
from precondattn_conformance.libraries import Library

Backend = tuple[str, ...] | None

PREFILL = 1024
"""The number of tokens per call when a cache is filled before decoding is timed."""

OUTPUT = "the output"


def gradient_of(name: str) -> str:
    """The name of a gradient among the results of a run."""
    return f"the gradient of {name}"


@dataclass(frozen=True)
class Computation:
    """An implementation of a mechanism."""

    name: str
    mechanism: pa.Mechanism
    """Its output is the one to compute; its inputs are passed by name."""
    forward: Callable[..., Array]
    vjp: Callable[..., tuple[Array, Callable[[Array], Arrays]]] | None = None
    """Output and pullback, for libraries without automatic differentiation."""
    decoder: Callable[[Library, str, Arrays], CacheDecoder] | None = None
    """Makes a decoder from the inputs of all tokens; the last token is decoded."""


def allowed(backend: str | None) -> Backend:
    """The backends of `"mine,torch"`, in order of preference; None is the default choice."""
    return None if backend is None else tuple(backend.split(","))


def ours(mechanism: pa.Mechanism, backend: str | None, name: str = "precondattn") -> Computation:
    """A mechanism on a backend, or on those chosen by default."""
    names = allowed(backend)
    forward, vjp = (partial(call, backend=names) for call in (mechanism.__call__, mechanism.vjp))
    return Computation(name, mechanism, forward, vjp, partial(CacheDecoder, mechanism, names))


def packed(computation: Computation, library: Library, b: int, t: int) -> Computation:
    """A computation of b sequences of t tokens (b, t, …) in one row (1, b t, …)."""
    own_vjp, patterns = computation.vjp, computation.mechanism.inputs
    assert own_vjp is not None  # Ours has one.
    ids = library.array(np.repeat(np.arange(b, dtype=np.int32), t)[None])

    def in_a_row(x: Arrays) -> Arrays:
        timed = [name for name in x if patterns[name].time_axis is not None]
        rows = {name: x[name].reshape(1, b * t, *x[name].shape[2:]) for name in timed}
        return x | rows | {"segment_ids": ids}

    def forward(**x: Array) -> Array:
        out = computation.forward(**in_a_row(x))
        return out.reshape(b, t, *out.shape[2:])

    def vjp(**x: Array) -> tuple[Array, Callable[[Array], Arrays]]:
        out, pullback = own_vjp(**in_a_row(x))

        def gradients(cotangent: Array) -> Arrays:
            of_rows = pullback(cotangent.reshape(out.shape))
            return {name: array.reshape(x[name].shape) for name, array in of_rows.items()}

        return out.reshape(b, t, *out.shape[2:]), gradients

    return replace(computation, forward=forward, vjp=vjp)


class CacheDecoder:
    """Decoding of one token with a mechanism's own cache, which is written in place."""

    filled: Array
    length: np.ndarray

    def __init__(
        self,
        mechanism: pa.Mechanism,
        backend: Backend,
        library: Library,
        dtype: str,
        inputs: Arrays,
    ) -> None:
        self.mechanism, self.backend, self.library = mechanism, backend, library
        self.inputs, self.dtype = inputs, dtype
        self.context = token_count(mechanism, inputs) - 1
        self.token = self._part(self.context, self.context + 1)

    @cached_property
    def cache(self) -> Cache:
        return self.mechanism.init_cache(**self.token, capacity=self.context + 1)

    def _part(self, start: int, stop: int) -> Arrays:
        part = slice_tokens(self.mechanism, self.inputs, start, stop)
        return {name: self.library.array(array, self.dtype) for name, array in part.items()}

    def _extended(self, new: Arrays) -> Array:
        """The output for new tokens, which are written into the cache."""
        out, self.cache = self.mechanism.extend(
            self.cache, **new, backend=self.backend, donate=True
        )
        return out

    def explain(self) -> Explanation:
        return self.mechanism.explain(**self.token, cache=self.cache, backend=self.backend)

    @property
    def is_by_the_reference(self) -> bool:
        """Whether filling the cache needs the reference, at a size that is too large for it."""
        return "reference" in self.explain().backends and self.context > PREFILL

    def fill(self) -> None:
        """Write the context into the cache. Called once, before the other methods."""
        if self.is_by_the_reference:
            raise UnsupportedError("the reference would have to fill the cache")
        with no_gradient(self.library):
            for start in range(0, self.context, PREFILL):
                self._extended(self._part(start, min(start + PREFILL, self.context)))
        self.filled = self.cache.length  # No extension writes to it.
        self.length = self.library.numpy(self.filled).astype(np.int32)

    def reset(self) -> None:
        """Restore the context's length. Each step overwrites the token's slot."""
        self.cache = self.cache._replace(length=self.filled)

    def step(self) -> Array:
        """The output for the token. Called under `no_gradient`."""
        return self._extended(self.token)

    def oracle_step(self) -> np.ndarray:
        """The oracle's output for the same token and the same cache."""
        token = {name: self.library.numpy(array) for name, array in self.token.items()}
        store = {name: self.library.numpy(array) for name, array in self.cache.store.items()}
        return self.continued(store, token)

    def continued(self, store: Arrays, new: Arrays) -> np.ndarray:
        """The oracle's output for new tokens after the context, whose cache holds `store`."""
        cache = Cache(self.length.copy(), store)
        return np.asarray(self.mechanism.extend(cache, **new, backend="reference")[0])


def token_count(mechanism: pa.Mechanism, inputs: Arrays) -> int:
    """How many tokens the inputs hold."""
    for name, pattern in mechanism.inputs.items():
        if pattern.time_axis is not None:
            return int(inputs[name].shape[pattern.time_axis])
    raise ValueError(f"{mechanism} has no input with a time axis")


def no_gradient(library: Library) -> AbstractContextManager[object]:
    """A context in which nothing is kept for a backward pass."""
    if library.name != "torch":
        return nullcontext()
    import torch

    without: AbstractContextManager[object] = torch.no_grad()
    return without


def forward_run(computation: Computation, library: Library, inputs: Arrays, calls: int = 1) -> Run:
    """The output, without what a gradient would need; the last of several calls'."""

    def forward(x: Arrays) -> Array:
        return computation.forward(**x)

    if library.name == "jax":
        import jax

        forward = jax.jit(forward)

    def call() -> Arrays:
        with no_gradient(library):
            for _ in range(calls - 1):
                out = forward(inputs)
                if library.name == "jax":  # It would queue the calls.
                    out.block_until_ready()
            return finished(library, {OUTPUT: forward(inputs)})

    return Run(call)


def backward_run(
    computation: Computation, library: Library, inputs: Arrays, cotangent: Array
) -> Run:
    """The output and every gradient: by the library's autograd, or else by the explicit vjp."""

    def both(x: Arrays, cotangent: Array) -> tuple[Array, Arrays]:
        if library.name == "torch":
            import torch

            out = computation.forward(**x)
            gradients = torch.autograd.grad(out, list(x.values()), cotangent)
            return out, dict(zip(x, gradients, strict=True))
        if library.name == "jax":
            import jax

            out, pullback = jax.vjp(lambda x: computation.forward(**x), x)
            return out, pullback(cotangent)[0]
        if computation.vjp is None:
            raise UnsupportedError(f"{computation.name} has no gradient on {library.name}")
        out, pullback = computation.vjp(**x)
        return out, pullback(cotangent)

    if library.name == "torch":
        inputs = {name: array.detach().requires_grad_() for name, array in inputs.items()}
    if library.name == "jax":
        import jax

        both = jax.jit(both)

    def call() -> Arrays:
        out, gradients = both(inputs, cotangent)
        by_name = {gradient_of(name): array for name, array in gradients.items()}
        return finished(library, {OUTPUT: out, **by_name})

    return Run(call)


def decode_run(library: Library, decoder: CacheDecoder, calls: int = 1) -> Run:
    """The output for one token, after a cache that is restored before every call."""

    def call() -> Arrays:
        with no_gradient(library):
            for _ in range(calls - 1):
                decoder.step()
                decoder.reset()
            return finished(library, {OUTPUT: decoder.step()})

    return Run(call, decoder.reset)


def finished(library: Library, results: Arrays) -> Arrays:
    """The results, after the device has computed them."""
    if library.name == "jax":
        import jax

        ready: Arrays = jax.block_until_ready(results)
        return ready
    if library.name == "torch" and any(r.is_cuda for r in results.values()):
        import torch

        torch.cuda.synchronize()
    if library.name == "cupy":
        import cupy

        cupy.cuda.get_current_stream().synchronize()
    return results
