"""Attention layers of PyTorch beside the same computation written by hand.

`layer_step` is a forward and a backward pass of an `Attention`; `layer_token` is one token of a
`Decoder` of four blocks after t others. The width is h d. By hand, only the mechanism's own calls
are ours: so a ratio is what the layer costs besides.

Both are compared with the layer by hand in float64, which has our weights. A result that differs is
not timed.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from precondattn.arrays import Array, Arrays
from precondattn.backend import UnsupportedError
from precondattn_conformance.bench.beside import Beside, worst
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import finished, no_gradient
from precondattn_conformance.bench.correct import KIND, Checked
from precondattn_conformance.bench.paired import Run, timed
from precondattn_conformance.libraries import Library
from precondattn_conformance.tolerance import bound

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from precondattn.cache import Cache

WORKS = {"layer_step": "forward_backward", "layer_token": "decode"}
"""The work of the mechanism, by the work of the layer."""

WRITTEN = ("softmax", "lucid", "laser", "gla", "gated_delta", "ccq(gated_delta)")
"""The mechanisms whose layers are written by hand, in `layers_by_hand.py`."""

BLOCKS, VOCABULARY = 4, 256


def measured(case: BenchCase, library: Library) -> Beside:
    """Our run of a case and the one by hand. Raises `WrongResultError`."""
    if case.mechanism not in WRITTEN:
        raise UnsupportedError(
            f"the layer of {case.mechanism} is not written by hand; those of {', '.join(WRITTEN)} "
            f"are"
        )
    make = _steps if case.work == "layer_step" else _tokens
    ours, by_hand, expected = make(case, library)
    results: list[Arrays] = []
    first = timed(lambda: results.append(ours.call()))
    limit = bound(case.dtype, KIND)
    errors = [
        worst(which, result, expected, library, limit)
        for which, result in (("our layer", results[0]), ("the layer by hand", by_hand.call()))
    ]
    what = f"{', '.join(expected)}, with the layer by hand in float64"
    checked = Checked(errors[0], limit, what)
    return Beside(ours, by_hand, "by_hand", checked, errors[1], first)


def _attention(case: BenchCase, like: Array) -> nn.Module:
    import torch

    from precondattn.layers.torch import Attention

    sizes = case.layout
    torch.manual_seed(0)
    kind = {"dtype": like.dtype, "device": like.device}
    return Attention(sizes.h * sizes.d, heads=sizes.h, mechanism=case.mechanism, **kind)


def _steps(case: BenchCase, library: Library) -> tuple[Run, Run, Arrays]:
    """A forward and a backward pass, and the output and dx in float64."""
    import numpy as np
    import torch

    from precondattn_conformance.bench.layers_by_hand import LAYERS

    sizes = case.layout
    draws = np.random.default_rng(1).normal(size=(2, sizes.b, sizes.t, sizes.h * sizes.d))
    x, cotangent = (library.array(array, case.dtype) for array in draws)
    attn = _attention(case, x)
    by_hand = LAYERS[case.mechanism](attn)
    exact = LAYERS[case.mechanism](copy.deepcopy(attn).double())

    def run(
        layer: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Array, cotangent: Array
    ) -> Run:
        leaf = x.detach().requires_grad_()

        def call() -> Arrays:
            y = layer(leaf)
            gradients = torch.autograd.grad(y, [leaf, *parameters], cotangent)
            return finished(library, {"the output": y.detach(), "the gradient of x": gradients[0]})

        return Run(call)

    expected = run(exact, exact.parameters, x.double(), cotangent.double()).call()
    return (
        run(attn, list(attn.parameters()), x, cotangent),
        run(by_hand, by_hand.parameters, x, cotangent),
        expected,
    )


def _tokens(case: BenchCase, library: Library) -> tuple[Run, Run, Arrays]:
    """The logits of one token, and the same in float64."""
    import numpy as np
    import torch

    from precondattn.layers.torch import Decoder
    from precondattn_conformance.bench.layers_by_hand import NextTokens

    sizes = case.layout
    like = library.array(np.zeros(1), case.dtype)
    torch.manual_seed(0)
    layers = [case.mechanism] * BLOCKS
    kind = {"dtype": like.dtype, "device": like.device}
    model = Decoder(VOCABULARY, sizes.h * sizes.d, heads=sizes.h, layers=layers, **kind)
    draws = np.random.default_rng(1).integers(VOCABULARY, size=(sizes.b, sizes.t + 1))
    tokens = torch.tensor(draws, device=like.device)

    def filled(model: nn.Module) -> tuple[Cache, ...]:
        """Caches of all tokens but the last."""
        with no_gradient(library):
            caches = model.init_caches(sizes.b, sizes.t + 1)
            filled: tuple[Cache, ...] = model(tokens[:, :-1], caches=caches)[1]
            return filled

    def run(step: Callable[[Tensor], Tensor], reset: Callable[[], None]) -> Run:
        def call() -> Arrays:
            with no_gradient(library):
                return finished(library, {"the logits": step(tokens[:, -1:])})

        return Run(call, reset)

    class Ours:
        """Our decoder, whose caches are written in place."""

        def __init__(self) -> None:
            self.caches = filled(model)
            self.lengths = [cache.length for cache in self.caches]

        def reset(self) -> None:
            pairs = zip(self.caches, self.lengths, strict=True)
            self.caches = tuple(cache._replace(length=length) for cache, length in pairs)

        def step(self, token: Tensor) -> Tensor:
            logits, self.caches = model(token, caches=self.caches, donate=True)
            return logits

    ours = Ours()
    by_hand = NextTokens(model, filled(model), sizes.t)
    wide = copy.deepcopy(model).double()
    exact = NextTokens(wide, filled(wide), sizes.t)
    expected = run(exact, exact.reset).call()
    return run(ours.step, ours.reset), run(by_hand, by_hand.reset), expected
