"""JAX: its arrays, and calls on them: derivatives of a backend's methods, several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precondattn.cache.kinds import holding
from precondattn.frameworks.framework import TIME, Framework, good_entries
from precondattn.frameworks.jax.solve import solve_triangular
from precondattn.frameworks.types import Array, Device, Step, Token, Tree

if TYPE_CHECKING:
    from precondattn.cache import Cache
    from precondattn.dispatch.plan import PlannedCall
    from precondattn.execution.arguments import BoundCall


class JAX(Framework):
    ignores_errors = False
    solve_triangular = staticmethod(solve_triangular)
    stop_gradient = staticmethod(lax.stop_gradient)

    def device_of(self, array: Array) -> str:
        if self.is_traced(array):
            # A traced array has no device yet; jitted code runs on the default backend.
            platform = jax.default_backend()
        else:
            platform = next(iter(array.devices())).platform
        return "cuda" if platform == "gpu" else str(platform)

    def exact_device(self, array: Array) -> frozenset[jax.Device] | None:
        return None if self.is_traced(array) else frozenset(array.devices())

    def placement(self, array: Array) -> dict[str, Device]:
        """As in `Framework`; empty where JAX creates arrays on that device itself."""
        if self.is_traced(array) or len(array.devices()) > 1:
            return {}
        default, (device,) = jax.config.jax_default_device, array.devices()
        if not isinstance(default, jax.Device):  # None, or the name of a platform.
            default = jax.local_devices(backend=default)[0]
        return {} if device == default else {"device": device}

    def reason_against(self, dtype: str) -> str | None:
        if dtype != "float64" or jax.config.jax_enable_x64:
            return None
        return "jax has no float64 here; jax_enable_x64 is false"

    def is_traced(self, array: Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def description(self, array: Array) -> Callable[[Array], Tree] | None:
        is_plain = type(array).__name__ == "ArrayImpl"
        return attrgetter("dtype", "shape", "sharding") if is_plain else None

    def wants_gradient(self, *arrays: Array) -> bool:
        return any(map(self.is_traced, arrays))

    def fresh(self, array: Array) -> Array:
        return jnp.array(array)

    def host_array(self, array: Array) -> Array:
        return None if self.is_traced(array) else np.asarray(array)

    def take_tokens(self, array: Array, tokens: Array) -> Array:
        """As in `Framework`, without communication between devices with different sequences."""
        sharding = jax.typeof(array).sharding
        if sharding.mesh.explicit_axes:
            of_sequences = jax.sharding.PartitionSpec(sharding.spec[0])
            tokens = jax.sharding.reshard(tokens, sharding.update(spec=of_sequences))

        def take(sequence: Array, tokens: Array) -> Array:
            return sequence.at[tokens].get(mode="promise_in_bounds")

        return jax.vmap(take)(array, tokens)

    def gathered(self, array: Array, axis: int) -> Array:
        sharding = jax.typeof(array).sharding
        if not sharding.mesh.explicit_axes or sharding.spec[axis] is None:
            return array
        names = (None if i == axis else name for i, name in enumerate(sharding.spec))
        return jax.sharding.reshard(array, sharding.update(spec=jax.sharding.PartitionSpec(*names)))

    def running_maximum(self, array: Array, axis: int) -> Array:
        return lax.cummax(array, axis=axis)

    def scan(
        self, step: Step, state: Array, inputs: Token, *, reverse: bool = False
    ) -> tuple[Array, Array]:
        """As in `Framework`. An unrolled loop would be traced as a copy of `step` per token."""
        time_first = tuple(jnp.moveaxis(x, TIME, 0) for x in inputs)
        state, outputs = lax.scan(step, state, time_first, reverse=reverse)
        return state, jnp.moveaxis(outputs, 0, TIME)

    def linear_scan(self, factor: Array, value: Array, *, times: Step, plus: Step) -> Array:
        if isinstance(value.shape[-1], int):
            return super().linear_scan(factor, value, times=times, plus=plus)

        def step(y: Array, token: Token) -> tuple[Array, Array]:
            y = plus(times(token[0], y), token[1])
            return y, y

        # A symbolic number of tokens takes an unknown number of steps.
        later = tuple(jnp.moveaxis(array[..., 1:], -1, 0) for array in (factor, value))
        _, outputs = lax.scan(step, value[..., 0], later)
        return jnp.concat([value[..., :1], jnp.moveaxis(outputs, 0, -1)], axis=-1)

    def traced_loop(self, *arrays: Array) -> Step | None:
        loop: Step = lax.scan
        return loop if any(map(self.is_traced, arrays)) else None

    def compiled(self, function: Callable[..., Array]) -> Callable[..., Array]:
        compiled: Callable[..., Array] = jax.jit(function)
        return compiled

    def vjp(
        self, function: Step, arrays: Sequence[Array], cotangents: Sequence[Array]
    ) -> tuple[Array, ...]:
        results, pullback = jax.vjp(function, *arrays)
        each = zip(cotangents, results, strict=True)
        gradients: tuple[Array, ...] = pullback(tuple(d.astype(r.dtype) for d, r in each))
        return gradients

    def are_finite(self, array: Array, low: float | None) -> bool:
        if self.is_traced(array):
            return False
        if len(array.devices()) == 1:
            # Not a copy, and JAX would compile two operations for the array's shape.
            array = np.asarray(array)
            return bool(good_entries(array, low).all())
        good = good_entries(array, low).all()
        # Under `jax.jit`, the result for a constant is traced too.
        return not self.is_traced(good) and bool(good)

    def bridge(self, planned: PlannedCall, call: BoundCall) -> Callable[..., Array] | None:
        if planned.runner.differentiable:
            return None
        from precondattn.frameworks.jax.autograd import apply

        bridge: Callable[..., Array] = apply
        return bridge

    def bridge_of_step(
        self, call: BoundCall, length: Array, planned: PlannedCall, *arrays: Array
    ) -> Step | None:
        """The gradient of a step is the backend's if the step is a kernel."""
        from precondattn.frameworks.jax.autograd import apply_step
        from precondattn.frameworks.jax.second_derivative import differentiates_step

        is_narrow = call.prepared.request.dtype == "float16" and not planned.backend.wide_values
        is_differentiable = planned.runner.differentiable or differentiates_step(
            planned.backend, planned.piece
        )
        has_bridge = planned.has_gradient_of_step and (is_narrow or not is_differentiable)
        return apply_step if has_bridge else None

    def adopted_cache(self, cache: Cache, like: Array) -> Cache:
        """The cache with NumPy's arrays as JAX's: JAX's own functions accept both."""
        if not any(isinstance(a, np.ndarray) for a in (cache.length, *cache.store.values())):
            return cache

        def moved(a: Array) -> Array:
            is_same = (
                isinstance(a, np.ndarray) and jax.dtypes.canonicalize_dtype(a.dtype) == a.dtype
            )
            return jnp.array(a) if is_same else a

        device = None if self.is_traced(like) else next(iter(like.devices()))
        with jax.default_device(device):
            store = {name: moved(a) for name, a in cache.store.items()}
            return holding(cache, moved(cache.length), store)


FRAMEWORK = JAX("jax")
