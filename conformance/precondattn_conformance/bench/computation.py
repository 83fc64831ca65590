"""A computation that can be timed: one mechanism, on one of our backends or by a peer.

It can run forward, forward and backward, and, if supported, one step of decoding. Results have the
same names for all implementations, so that they can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

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
T = TypeVar("T")

PREFILL = 1024
"""The number of tokens per call when a cache is filled before decoding is timed."""


class TokenDecoder(Protocol):
    """A cache for a context, and the next token."""

    def fill(self) -> None:
        """Write the context into the cache. Called once, first."""

    def reset(self) -> None:
        """Remove the token from the cache."""

    def step(self) -> Array:
        """The output for the token. Called under `no_gradient`."""

    def oracle_step(self) -> np.ndarray:
        """The oracle's output for the same token and the same cache, in float64."""


@dataclass(frozen=True)
class Computation:
    """An implementation of a mechanism."""

    name: str
    mechanism: pa.Mechanism
    """Its output is the one to compute; its inputs are passed by name."""
    forward: Callable[..., Array]
    vjp: Callable[..., tuple[Array, Callable[[Array], Arrays]]] | None = None
    """Output and pullback, for libraries without automatic differentiation."""
    decoder: Callable[[Library, str, Arrays], TokenDecoder] | None = None
    """Makes a decoder from the inputs of all tokens; the last token is decoded."""


def allowed(backend: str | None) -> Backend:
    """The backends of `"mine,torch"`, in order of preference; None is the default choice."""
    return None if backend is None else tuple(backend.split(","))


def ours(mechanism: pa.Mechanism, backend: str | None, name: str = "precondattn") -> Computation:
    """A mechanism on a backend, or on those chosen by default."""
    names = allowed(backend)
    return Computation(
        name,
        mechanism,
        forward=lambda **x: mechanism(**x, backend=names),
        vjp=lambda **x: mechanism.vjp(**x, backend=names),
        decoder=lambda library, dtype, x: CacheDecoder(mechanism, names, library, dtype, x),
    )


def packed(computation: Computation, library: Library) -> Computation:
    """The computation of a batch (b, t, …) whose sequences are packed into one row (1, b t, …)."""
    patterns = computation.mechanism.inputs

    def rows(x: Arrays) -> Arrays:
        return {
            name: array.reshape(1, -1, *array.shape[2:]) if patterns[name].time_axis else array
            for name, array in x.items()
        }

    def segments(x: Arrays) -> Array:
        b, t = x["q"].shape[:2]
        return library.array(np.repeat(np.arange(b, dtype=np.int32), t)[None])

    def forward(**x: Array) -> Array:
        out = computation.forward(**rows(x), segment_ids=segments(x))
        return out.reshape(*x["q"].shape[:2], *out.shape[2:])

    def vjp(**x: Array) -> tuple[Array, Callable[[Array], Arrays]]:
        assert computation.vjp is not None
        out, pull = computation.vjp(**rows(x), segment_ids=segments(x))

        def pullback(cotangent: Array) -> Arrays:
            gradients = pull(cotangent.reshape(out.shape))
            return {name: gradients[name].reshape(array.shape) for name, array in x.items()}

        return out.reshape(*x["q"].shape[:2], *out.shape[2:]), pullback

    return Computation(computation.name, computation.mechanism, forward, vjp)


class CacheDecoder:
    """Decoding with a mechanism's own cache, which is written in place."""

    def __init__(
        self,
        mechanism: pa.Mechanism,
        backend: Backend,
        library: Library,
        dtype: str,
        inputs: Arrays,
    ) -> None:
        self.mechanism, self.backend, self.library = mechanism, backend, library
        tokens = token_count(mechanism, inputs)
        new = slice_tokens(mechanism, inputs, tokens - 1, tokens)
        self.token = {name: library.array(array, dtype) for name, array in new.items()}
        self.inputs, self.dtype, self.context = inputs, dtype, tokens - 1
        self.cache = mechanism.init_cache(**self.token, capacity=tokens)
        self.filled: Array = None
        self.length: Array = None

    def explain(self) -> Explanation:
        return self.mechanism.explain(**self.token, cache=self.cache, backend=self.backend)

    @property
    def is_by_the_reference(self) -> bool:
        """Whether filling the cache needs the reference, at a size that is too large for it."""
        return "reference" in self.explain().backends and self.context > PREFILL

    def fill(self) -> None:
        if self.is_by_the_reference:
            raise UnsupportedError("the reference would have to fill the cache")
        with no_gradient(self.library):
            for start in range(0, self.context, PREFILL):
                stop = min(start + PREFILL, self.context)
                part = slice_tokens(self.mechanism, self.inputs, start, stop)
                new = {name: self.library.array(a, self.dtype) for name, a in part.items()}
                self.cache = self.mechanism.extend(
                    self.cache, **new, backend=self.backend, donate=True
                )[1]
        self.filled = self.cache.length  # No extension writes to it.
        self.length = self.library.numpy(self.filled).astype(np.int32)

    def reset(self) -> None:
        """Restore the context's length. Each step overwrites the token's slot."""
        self.cache = self.cache._replace(length=self.filled)

    def step(self) -> Array:
        out, self.cache = self.mechanism.extend(
            self.cache, **self.token, backend=self.backend, donate=True
        )
        return out

    def oracle_step(self) -> np.ndarray:
        self.reset()
        store = {name: self.library.numpy(array) for name, array in self.cache.store.items()}
        token: Arrays = {name: self.library.numpy(array) for name, array in self.token.items()}
        cache = Cache(self.length.copy(), store)
        return np.asarray(self.mechanism.extend(cache, **token, backend="reference")[0])


def token_count(mechanism: pa.Mechanism, inputs: Arrays) -> int:
    """How many tokens the inputs hold."""
    for name, pattern in mechanism.inputs.items():
        if pattern.time_axis is not None:
            return int(inputs[name].shape[pattern.time_axis])
    raise ValueError(f"{mechanism} has no input with a time axis")


def no_gradient(library: Library) -> AbstractContextManager[object]:
    """A context in which nothing is kept for a backward pass."""
    if library.name == "torch":
        import torch

        without: AbstractContextManager[object] = torch.no_grad()
        return without
    return library.precision("")  # The base class's context, which does nothing.


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
            return finished(library, {"the output": forward(inputs)})

    return Run(call)


def backward_run(
    computation: Computation, library: Library, inputs: Arrays, cotangent: Array
) -> Run:
    """The output and every gradient: by the library's autograd, or else by the explicit vjp."""

    def named(out: Array, gradients: Arrays) -> Arrays:
        named_gradients = {f"the gradient of {name}": array for name, array in gradients.items()}
        return finished(library, {"the output": out, **named_gradients})

    if library.name == "torch":
        import torch

        leaves = {name: array.detach().requires_grad_() for name, array in inputs.items()}

        def by_autograd() -> Arrays:
            out = computation.forward(**leaves)
            gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
            return named(out, dict(zip(leaves, gradients, strict=True)))

        return Run(by_autograd)
    if library.name == "jax":
        import jax

        def both(x: Arrays, cotangent: Array) -> tuple[Array, Arrays]:
            out, pullback = jax.vjp(lambda x: computation.forward(**x), x)
            return out, pullback(cotangent)[0]

        compiled = jax.jit(both)
        return Run(lambda: named(*compiled(inputs, cotangent)))
    if computation.vjp is None:
        raise UnsupportedError(f"{computation.name} has no gradient on {library.name}")
    explicit = computation.vjp

    def by_vjp() -> Arrays:
        out, pullback = explicit(**inputs)
        return named(out, pullback(cotangent))

    return Run(by_vjp)


def decode_run(library: Library, decoder: TokenDecoder, calls: int = 1) -> Run:
    """The output for one token, after a cache that is restored before every call."""

    def call() -> Arrays:
        with no_gradient(library):
            for _ in range(calls - 1):
                decoder.step()
                decoder.reset()
            return finished(library, {"the output": decoder.step()})

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


def entry_for(table: Mapping[str, T], mechanism: pa.Mechanism) -> T | None:
    """The entry of a table, by expression, that computes a mechanism, or another name of its
    recurrence with the same scale. None without one."""
    if str(mechanism) in table or not isinstance(mechanism, pa.LinearFamily):
        return table.get(str(mechanism))
    for text, entry in table.items():
        other = pa.parse(text)
        if isinstance(other, pa.LinearFamily) and _key(other) == _key(mechanism):
            return entry
    return None


def _key(leaf: pa.LinearFamily) -> object:
    """What two names of a recurrence have in common; the leaf itself where it declares none."""
    return leaf if leaf.recurrence is None else (leaf.recurrence, leaf.scale)
