"""The check `sharding`: calls on several JAX devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Array, Arrays
from precondattn.cache.windows import FIRST
from precondattn_conformance.case import Case
from precondattn_conformance.checks.caching import Caching
from precondattn_conformance.checks.check import Check, Measured, NotRunError, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import slice_tokens

if TYPE_CHECKING:
    import jax

FLAG = "XLA_FLAGS=--xla_force_host_platform_device_count=4"
COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


class Sharding(Check):
    """Arrays that are sharded over batch and heads stay so, without communication between devices.

    Output, gradients and `extend` equal the oracle's, and are sharded as declared. The compiled
    text contains no collective, except one sum over a mesh axis for the gradient of an input that
    is not sharded over it. Heads whose decay depends on their index are not sharded. Four devices
    hold two sequences and two key/value heads; two devices hold two heads.
    """

    name = "sharding"
    snippet = """call = jax.jit(lambda arrays: mechanism(**arrays, backend={backend}))
out = call(inputs)  # The check shards the arrays over devices."""

    def applies(self, case: Case) -> bool:
        return case.library == "jax"

    def run(self, trial: Trial) -> Measured:
        import jax

        trial.require_outputs()
        devices = jax.devices(trial.library.device)[:4]
        shards = _Shards(devices, divides_heads=not trial.mechanism.numbers_heads)
        inputs = shards.placed(trial.mechanism.inputs, trial.inputs)
        masks = {n: shards.put(Pattern.read("b s"), a) for n, a in trial.masks.items()}
        output = trial.mechanism.program.output
        cotangent = trial.cotangent()

        def call(x: Mapping[str, Array], masks: Mapping[str, Array]) -> Array:
            return trial.mechanism(**x, **masks, backend=trial.backend)

        def gradients(
            x: Mapping[str, Array], masks: Mapping[str, Array], cotangent: Array
        ) -> tuple[Array, Arrays]:
            out, pullback = jax.vjp(lambda x: call(x, masks), x)
            return out, pullback(cotangent)[0]

        out, found = shards.run("the output", call, (inputs, masks)), {}
        if not trial.no_gradient:
            arguments = (inputs, masks, shards.put(output, cotangent))
            sums = sum(shards.sums(trial.mechanism.inputs[n], a) for n, a in inputs.items())
            out, found = shards.run("the gradient", gradients, arguments, sums)
        shards.require("the output", output, out)
        for name, gradient in found.items():
            shards.require(f"the gradient of {name}", trial.mechanism.inputs[name], gradient)
        pairs = trial.pairs_of(out, found, "autograd")
        if Caching().applies(trial.case):
            with suppress(pa.UnsupportedError):  # A backend may support full calls only.
                pairs["the extended output"] = (_extended(trial, shards), trial.expected.out)
        return trial.agree(pairs)


class _Shards:
    """The device mesh: two devices along key/value heads and, with four devices, two sequences."""

    def __init__(self, devices: list[jax.Device], *, divides_heads: bool) -> None:
        from jax.sharding import Mesh

        if len(devices) < 2:
            raise NotRunError(f"there is one device; on a CPU, set {FLAG}")
        self.divides_heads = divides_heads
        sequences = len(devices) // 2
        self.mesh = Mesh(np.array(devices[: 2 * sequences]).reshape(sequences, 2), ("b", "h"))

    def spec(self, pattern: Pattern, array: Array) -> tuple[str | None, ...]:
        """The mesh axis of each axis of an array; None for an axis that is not sharded."""
        names = {"b": "b"} | (dict.fromkeys("nhu", "h") if self.divides_heads else {})
        return tuple(
            names.get(axis.letter) if size % 2 == 0 else None
            for axis, size in zip(pattern.axes, array.shape, strict=True)
        )

    def put(self, pattern: Pattern, array: Array) -> Array:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        spec = PartitionSpec(*self.spec(pattern, array))
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def placed(self, patterns: Mapping[str, Pattern], arrays: Mapping[str, Array]) -> Arrays:
        return {name: self.put(patterns[name], array) for name, array in arrays.items()}

    def sums(self, pattern: Pattern, array: Array) -> int:
        """The number of mesh axes over which devices share the array and sum its gradient."""
        spec = self.spec(pattern, array)
        return sum(size > 1 and name not in spec for name, size in self.mesh.shape.items())

    def run(
        self, what: str, function: Callable[..., Array], arrays: tuple[object, ...], sums: int = 0
    ) -> Array:
        """The result of the compiled function, whose text may contain at most this many sums."""
        import jax

        compiled = jax.jit(function).lower(*arrays).compile()
        found = COLLECTIVE.findall(compiled.as_text())
        if found.count("all-reduce") > sums or set(found) - {"all-reduce"}:
            raise DisagreementError(
                f"{what} of sharded arrays has the collectives {', '.join(sorted(found))}; "
                f"at most {sums} all-reduce expected"
            )
        return compiled(*arrays)

    def require(self, what: str, pattern: Pattern, array: Array) -> None:
        expected = self.spec(pattern, array)
        spec = tuple(array.sharding.spec)
        found = (*spec, *(None,) * (len(expected) - len(spec)))
        if any(name not in (None, there) for name, there in zip(expected, found, strict=True)):
            raise DisagreementError(f"{what} is sharded over {found}, not over {expected}")


def _extended(trial: Trial, shards: _Shards) -> np.ndarray:
    """The output of a prefill, and of one more token after it, without collectives."""
    m, layout = trial.mechanism, trial.case.layout
    slots = {name: pattern for name, (_, pattern) in m.program.slots.items()}
    slots[FIRST] = Pattern.read("b")
    cache = m.init_cache(**trial.inputs, capacity=layout.t)
    cache = cache._replace(
        length=shards.put(Pattern.read("b"), cache.length), store=shards.placed(slots, cache.store)
    )

    def extend(cache: pa.Cache, x: Mapping[str, Array]) -> tuple[Array, pa.Cache]:
        return m.extend(cache, **x, backend=trial.backend)

    outs = []
    for start, stop in ((0, layout.t - 1), (layout.t - 1, layout.t)):
        tokens = trial.arrays(slice_tokens(m, trial.numpy_inputs, start, stop))
        new = shards.placed(m.inputs.extending(), tokens)
        out, cache = shards.run("extend", extend, (cache, new))
        for name, buffer in cache.store.items():
            shards.require(f"the buffer {name!r}", slots[name], buffer)
        outs.append(trial.numpy(out))
    return np.concatenate(outs, axis=1)
