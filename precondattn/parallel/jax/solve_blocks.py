"""The blocks of LUCID's solve on the devices of JAX, which all run one program.

All blocks have equally many rows, at most BLOCK. Where a part of the layout is not a multiple of
that, its last block ends with masked rows. A device stacks its blocks in one array (blocks, b,
rows, …).

In each step of the loop, the device that has a block solves it and broadcasts it, and all devices
subtract from their later rows (`solve.py`). A broadcast is a sum over devices, to which the others
add 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Arrays, Tree, upcast
from precondattn.parallel.jax.call import DeviceLine
from precondattn.parallel.masks import DividedMasks
from precondattn.spec.lucid import LucidSolve


@dataclass(frozen=True)
class SolveBlocks:
    """The static arguments of a call, and the layout of the blocks."""

    leaf: LucidSolve
    line: DeviceLine
    backend: BackendNames
    tokens: int
    """The number of tokens of each device"""
    most: int
    """The most rows of a block"""

    @property
    def part(self) -> int:
        """The number of tokens in a part of the layout."""
        return self.line.order.part_of(self.tokens)

    @property
    def of_part(self) -> int:
        """The number of blocks in a part."""
        return -(-self.part // self.most)

    @property
    def rows(self) -> int:
        """The number of rows in a block."""
        return -(-self.part // self.of_part)

    @property
    def of_device(self) -> int:
        """The number of blocks of a device."""
        return self.tokens // self.part * self.of_part

    @property
    def all(self) -> int:
        return self.of_device * self.line.devices

    # ------------------------------------------------------------------------------- layout

    def stacked(self, x: Array) -> Array:
        """x (b, tokens, …) as (blocks, b, rows, …). Rows without a token repeat the last one."""
        b, _, *rest = x.shape
        parts = jnp.reshape(x, (b, -1, self.part, *rest))
        more = self.of_part * self.rows - self.part
        parts = jnp.pad(parts, ((0, 0), (0, 0), (0, more), *((0, 0),) * len(rest)), mode="edge")
        return jnp.moveaxis(jnp.reshape(parts, (b, self.of_device, self.rows, *rest)), 1, 0)

    def unstacked(self, stack: Array) -> Array:
        """The tokens (b, tokens, …) of a stack (blocks, b, rows, …)."""
        _, b, _, *rest = stack.shape
        parts = jnp.reshape(jnp.moveaxis(stack, 0, 1), (b, -1, self.of_part * self.rows, *rest))
        return jnp.reshape(parts[:, :, : self.part], (b, self.tokens, *rest))

    def valid(self, masks: DividedMasks, b: int) -> Array | None:
        """Which rows of a device are unmasked tokens (blocks, b, rows); None if all are."""
        valid = None if masks.valid is None else self.stacked(masks.valid[self.line.rank])
        if self.of_part * self.rows == self.part:
            return valid
        row = jnp.arange(self.of_device)[:, None] % self.of_part * self.rows + jnp.arange(self.rows)
        is_token = jnp.broadcast_to((row < self.part)[:, None], (self.of_device, b, self.rows))
        return is_token if valid is None else valid & is_token

    def segment(self, masks: DividedMasks, device: Array) -> Array | None:
        """The segments of a device's rows (blocks, b, rows)."""
        return None if masks.segment is None else self.stacked(masks.segment[device])

    # -------------------------------------------------------------------------------- order

    def place(self, number: Array) -> tuple[Array, Array]:
        """The device that has block `number`, and the index of the block in its stack."""
        devices, order = self.line.devices, self.line.order
        part, within = number // self.of_part, number % self.of_part
        count = self.tokens // self.part * devices
        device_of = jnp.asarray([order.device_of(i, devices) for i in range(count)])
        return device_of[part], part // devices * self.of_part + within

    def earlier(self, number: Array) -> Array:
        """The number of this device's blocks before block `number` of the sequence."""
        block, order = jnp.arange(self.of_device), self.line.order
        part = order.number_of(self.line.rank, block // self.of_part, self.line.devices)
        numbers = part * self.of_part + block % self.of_part
        return jnp.sum(numbers < number, dtype=jnp.int32)

    def is_own(self, number: Array) -> Array:
        return self.place(number)[0] == self.line.rank

    # -------------------------------------------------------------------------------- steps

    def of_block(self, x: Arrays, i: Array) -> Arrays:
        """The arguments of the solve of this device's block i; x has stacks, or None, by name."""
        of_block = {name: upcast(stack[i]) for name, stack in x.items() if stack is not None}
        return {**of_block, "backend": self.backend}

    def broadcast(self, number: Array, stacks: tuple[Array, ...]) -> tuple[Array, ...]:
        """Block `number`, broadcast from the stacks of the device that has it."""
        device, i = self.place(number)
        is_own = device == self.line.rank
        sent = tuple(jnp.where(is_own, x[i], jnp.zeros_like(x[i])) for x in stacks)
        received: tuple[Array, ...] = self._varying(lax.psum(sent, self.line.axis))
        return received

    def where_own(self, number: Array, function: Callable[[], Tree]) -> Tree:
        """function() on the device that has block `number`; zeros on others, which skip it."""
        shapes = jax.eval_shape(function)

        def nothing() -> Tree:
            return self._varying(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

        return lax.cond(self.is_own(number), function, nothing)

    def _varying(self, arrays: Tree) -> Tree:
        """Replicated arrays, marked as varying, which the checks of `shard_map` require."""
        return lax.pcast(arrays, self.line.axis, to="varying")
