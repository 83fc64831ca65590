"""Calls of kernels in Triton's interpreter, which are held against the definition in float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import ArraySpec
from precondattn.frame import full_frame
from precondattn.kernel_backend.precise import VARIABLE
from precondattn.kernel_backend.stateful import StatefulKernels
from precondattn.spec.stateful import Stateful
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.tolerance import error
from precondattn_triton import Triton
from tests.backends.triton.tiles import SMALL, tiles_as_given

BACKENDS = ("triton", "torch")
DTYPES = ("float32", "float16", "bfloat16")
OF_SCORES = dict(zip(DTYPES, (2e-5, 5e-3, 2e-2), strict=True))
OF_SOLVES = dict(zip(DTYPES, (2e-5, 8e-3, 2e-2), strict=True))
OF_RECURRENCES = dict(zip(DTYPES, (2e-6, 2e-3, 1e-2), strict=True))
SMALL_BLOCKS = {"precondattn_triton.path.blocks.SMALLEST": 32}
"""Blocks of two chunks of PaTH's reflections, so that short sequences have several."""

Change = Callable[[dict[str, torch.Tensor], torch.Tensor], None]
"""A change of inputs and cotangent in place, before they are rounded."""


@dataclass(frozen=True)
class KernelCall:
    """The mechanism, sizes, inputs, masks and tiles of a call, and what is held of it."""

    expression: str
    t: int
    s: int | None = None
    b: int = 1
    h: int = 1
    n: int = 1
    d: int = 16
    e: int = 8
    m: int = 5
    """The number of slots."""
    u: int = 1
    """Value heads for each query head, where a mechanism allows several."""
    dtype: str = "float32"
    keys: str = "random"
    shared: str = ""
    """The axes of b and h along which a bias has one entry."""
    change: Change | None = None
    lengths: tuple[int, ...] = ()
    segments: tuple[tuple[int, ...], ...] = ()
    """The lengths of the segments of each sequence."""
    hides_keys: bool = False
    """Whether two of five keys are masked, and all keys of a second sequence."""
    tiles: Mapping[str, object] | None = field(default_factory=dict)
    """Tiles in place of small ones; None for the shipped ones."""
    patches: Mapping[str, object] = field(default_factory=dict)
    is_precise: bool = False
    bound: float | None = None
    gradient_bound: float | None = None
    smallest: float | None = None
    """The size of results below which errors are absolute; None: that of the mechanism."""
    backend: str | tuple[str, ...] = BACKENDS

    @property
    def mechanism(self) -> pa.Mechanism:
        return pa.parse(self.expression)

    @property
    def length(self) -> int:
        return self.s or self.t

    def arrays(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The inputs and a cotangent."""
        layout = CallLayout(
            "call", self.b, self.t, self.length, self.h, self.n, self.d, self.e, self.m,
            values_per_head=self.u, broadcast=self.shared,
        )  # fmt: skip
        made = make_inputs(self.mechanism, layout, self.keys)
        x = {name: torch.from_numpy(array.copy()) for name, array in made.items()}
        shape = self.mechanism.program.output.shape(layout.sizes)
        d_out = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
        if self.change is not None:
            self.change(x, d_out)
        dtype = getattr(torch, self.dtype)
        return {name: array.to(dtype) for name, array in x.items()}, d_out.to(dtype)

    def masks(self) -> dict[str, torch.Tensor]:
        found = {}
        if self.lengths:
            found["lengths"] = torch.tensor(self.lengths)
        if self.segments:
            found["segment_ids"] = torch.stack([ids_of(lengths) for lengths in self.segments])
        if self.hides_keys:
            is_seen = torch.arange(self.length) % 5 > 1
            found["key_mask"] = is_seen & (torch.arange(self.b) != 1)[:, None]
        return found

    def invalid(self, name: str) -> torch.Tensor | None:
        """The tokens (b, t) of an input, or of the output, that have no effect."""
        pattern = self.mechanism.inputs.get(name) or self.mechanism.program.output
        axes = "".join(axis.letter for axis in pattern.axes)
        is_late = torch.zeros(self.b, self.length, dtype=torch.bool)
        if self.lengths and (axes.startswith("bs") or self.t == self.length):
            is_late = torch.arange(self.length) >= torch.tensor(self.lengths)[:, None]
        if self.hides_keys and axes.startswith("bs"):
            is_late = is_late | ~self.masks()["key_mask"]
        return is_late if axes[:2] in ("bs", "bt") and is_late.any() else None

    def with_nan(self, name: str, array: torch.Tensor) -> torch.Tensor:
        is_late = self.invalid(name)
        if is_late is None:
            return array
        return array.masked_fill(
            is_late.reshape(*is_late.shape, *[1] * (array.ndim - 2)), torch.nan
        )

    def run(
        self, x: dict[str, torch.Tensor], d_out: torch.Tensor, seed: int = 0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Output, gradients and residuals by the kernels, whose shapes are the declared ones."""
        tiles = {} if self.tiles is None else {**SMALL, **self.tiles}
        with ExitStack() as stack:
            for target, value in {**SMALL_BLOCKS, **self.patches}.items():
                stack.enter_context(patch(target, value))
            if self.is_precise:
                stack.enter_context(patch.dict(os.environ, {VARIABLE: "1"}))
            stack.enter_context(tiles_as_given(seed, tiles))
            stack.enter_context(torch.no_grad())
            piece = self._piece()
            if piece is None:
                out, pullback = self.mechanism.vjp(**x, **self.masks(), backend=self.backend)
                return out, pullback(d_out), ()
            kernels = Triton().kernels(piece)
            frame = full_frame(self.t, self.length, x["k"], **self.masks())
            out, residuals = kernels.forward(piece, x, frame)
            gradients = kernels.backward(piece, x, frame, out, residuals, d_out)
        specs = {name: ArraySpec.of(array) for name, array in x.items()}
        shapes = [ArraySpec.of(array) for array in residuals]
        assert shapes == list(kernels.residual_shapes(piece, specs))
        return out, gradients, residuals

    def _piece(self) -> object:
        """The leaf or group that is one call of kernels without a state."""
        leaves = self.mechanism.program.leaves
        piece = leaves[0] if len(leaves) == 1 else Group(group_of(self.expression))
        kernels = Triton().kernels(piece)
        is_direct = hasattr(kernels, "residual_shapes") and not isinstance(kernels, StatefulKernels)
        return piece if is_direct and self.backend == BACKENDS else None

    def bounds(self) -> tuple[float, float, float]:
        """The largest errors of output and gradients; the size below which they are absolute."""
        leaves = self.mechanism.program.leaves
        if any(isinstance(leaf, pa.LucidSolve) for leaf in leaves):
            bound, factor, smallest = OF_SOLVES[self.dtype], 4, 0.1
        elif isinstance(leaves[-1], Stateful):
            bound, factor, smallest = OF_RECURRENCES[self.dtype], 2, 0.1
        else:
            bound, factor, smallest = OF_SCORES[self.dtype], 2, 0.0
        bound = self.bound or bound
        smallest = smallest if self.smallest is None else self.smallest
        return bound, self.gradient_bound or factor * bound, smallest

    def check(self):
        """The kernels agree with the definition, whatever invalid tokens contain.

        Results have the shapes and dtypes of what they belong to, gradients of invalid tokens are
        0, and no input is written.
        """
        x, d_out = self.arrays()
        given = {name: self.with_nan(name, array) for name, array in x.items()}
        before = {name: array.clone() for name, array in given.items()}
        out, gradients, residuals = self.run(given, self.with_nan("out", d_out))
        mechanism, masks, exact = self.mechanism, self.masks(), doubled(x)
        expected, pullback = mechanism.vjp(**exact, **masks, backend="reference")
        wanted = pullback(d_out.double())
        bound, gradient_bound, smallest = self.bounds()
        assert gradients.keys() == wanted.keys()
        results = {"out": (out, expected, d_out, bound)}
        results |= {n: (gradients[n], wanted[n], x[n], gradient_bound) for n in wanted}
        for name, (found, right, like, most) in results.items():
            assert (found.shape, found.dtype) == (like.shape, like.dtype), name
            difference = error(found.double().numpy(), right.numpy(), 0.0, smallest)
            assert difference < most, (name, difference)
            is_late = self.invalid(name)
            assert is_late is None or not found[is_late].any(), name
        for name, array in given.items():
            torch.testing.assert_close(array, before[name], rtol=0, atol=0, equal_nan=True)
        return out, gradients, residuals


def row(name, expression, t, *, marks=(), then=None, **options):
    """A row of a table: a call by its name, and a function that examines its results."""
    call = KernelCall(expression, t, **options)
    return pytest.param(call, then, id=name, marks=marks)


def rows(*params):
    return pytest.mark.parametrize(("call", "then"), params)


def hold(call, then):
    results = call.check()
    if then is not None:
        then(*results)


thorough = pytest.mark.thorough


def ids_of(lengths):
    """Segment ids that differ in high bits too, and are not in order."""
    ids = torch.tensor([2**40, 1, 2**40 + 2**32, 7, 2, 9])[: len(lengths)]
    return ids.repeat_interleave(torch.tensor(lengths))


def doubled(arrays):
    return {name: array.double() for name, array in arrays.items()}


def scaled(**factors):
    """A change that multiplies inputs, or the cotangent `d_out`, by numbers or by arrays."""

    def change(x, d_out):
        for name, factor in factors.items():
            (d_out if name == "d_out" else x[name]).mul_(torch.as_tensor(factor))

    return change


def both(*changes):
    """A change after another one."""

    def change(x, d_out):
        for each in changes:
            each(x, d_out)

    return change


def cluster(x, d_out):
    """Keys in a cluster, some equal, to which most directions of PaTH are nearly orthogonal.

    A reflection along a key would make its scores with later keys almost 0, on which a test of a
    solve would then not depend.
    """
    x["k"].mul_(0.3)[..., 0] += 1
    x["k"][:, 5:9] = x["k"][:, 5:6]
    x["w"][:, 1:, :, 0] *= 0.2
    x["w"] /= x["w"].norm(dim=-1, keepdim=True)
