"""Whether a long call is right: its first tokens are compared with the definition in float32.

In a causal call, the outputs of the first tokens equal those of a call on these tokens alone. If
the cotangent is zero after them, the same holds for their gradients, and all later gradients are
zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import precondattn as pa
from precondattn_conformance.bench.computation import CacheDecoder, Computation
from precondattn_conformance.bench.correct import KIND, Checked, WrongResultError
from precondattn_conformance.bench.peers import SdpaDecoder
from precondattn_conformance.inputs import slice_tokens
from precondattn_conformance.tolerance import bound, error

FIRST = 1024
Tensors = dict[str, torch.Tensor]


class FirstTokens:
    """Expected output and gradients of the first tokens, computed by the definition."""

    def __init__(self, mechanism: pa.Mechanism, x: Tensors, dtype: str) -> None:
        self.mechanism, self.limit = mechanism, bound(dtype, KIND)
        tokens = next(iter(x.values())).shape[1]
        self.count = min(FIRST, tokens)
        compared: Tensors = slice_tokens(mechanism, x, 0, self.count)
        compared = {name: array.float() for name, array in compared.items()}
        shape = mechanism.program.output.shape(
            mechanism.inputs.sizes(str(mechanism), {n: tuple(a.shape) for n, a in compared.items()})
        )
        device = next(iter(compared.values())).device
        generator = torch.Generator(device).manual_seed(1)
        cotangent = torch.randn(shape, generator=generator, device=device)
        cotangent = cotangent.to(getattr(torch, dtype))
        self.out, self.gradients = _by_sequence(mechanism, compared, cotangent.float())
        self.cotangent = torch.zeros(
            (cotangent.shape[0], tokens, *cotangent.shape[2:]),
            dtype=cotangent.dtype,
            device=cotangent.device,
        )
        self.cotangent[:, : self.count] = cotangent

    def check(self, out: torch.Tensor, gradients: Tensors | None = None) -> Checked:
        """Return the largest error; raise `WrongResultError` if one exceeds its bound."""
        if not bool(torch.isfinite(out).all()):
            raise WrongResultError("the output, which is not finite,", float("inf"), self.limit)
        worst = self._compare("the output", out[:, : self.count], self.out)
        for name, gradient in (gradients or {}).items():
            what = f"the gradient of {name}"
            if self.mechanism.inputs[name].time_axis == 1:
                later, size = gradient[:, self.count :].abs(), self.gradients[name].abs().max()
                if later.numel() and not bool(later.max() <= self.limit * size):
                    raise WrongResultError(f"{what}, not zero later,", float("inf"), self.limit)
                gradient = gradient[:, : self.count]
            worst = max(worst, self._compare(what, gradient, self.gradients[name]))
        return Checked(worst, self.limit, f"the first {self.count} tokens, in float32")

    def _compare(self, what: str, result: torch.Tensor, expected: torch.Tensor) -> float:
        return compared(what, result, expected, self.limit)


def _by_sequence(
    mechanism: pa.Mechanism, x: Tensors, cotangent: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """Output and gradients by the definition, one sequence at a time to limit memory."""
    outs, gradients = [], []
    has_batch = {name: "b" in pattern.letters for name, pattern in mechanism.inputs.items()}
    with torch.no_grad():
        for i in range(cotangent.shape[0]):
            one = {name: a[i : i + 1] if has_batch[name] else a for name, a in x.items()}
            out, pullback = mechanism.vjp(**one, backend="reference")
            outs.append(out)
            gradients.append(pullback(cotangent[i : i + 1]))
    whole = {
        name: torch.cat([g[name] for g in gradients]) if has_batch[name]
        else sum(g[name] for g in gradients)
        for name in x
    }  # fmt: skip
    return torch.cat(outs), whole


def compared(what: str, result: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    """The error of a result; raises `WrongResultError` beyond the limit."""
    measured = error(result.detach().double().cpu().numpy(), expected.double().cpu().numpy())
    if not measured <= limit:
        raise WrongResultError(what, measured, limit)
    return measured


def check_step(
    computation: Computation, decoder: CacheDecoder, call: Callable[[], torch.Tensor], dtype: str
) -> Checked:
    """Compare one token after a cache with the definition in float32 on the same cache."""
    decoder.reset()
    if isinstance(decoder, SdpaDecoder):
        x = {name: array.float() for name, array in decoder.inputs.items()}
        expected = computation.mechanism(**(x | {"q": x["q"][:, -1:]}), backend="reference")
    else:
        wide = {name: _wide(array) for name, array in decoder.cache.store.items()}
        token = {name: _wide(array) for name, array in decoder.token.items()}
        cache = decoder.cache._replace(store=wide)
        expected = computation.mechanism.extend(cache, **token, backend="reference")[0]
    limit = bound(dtype, KIND)
    worst = compared(f"the token after {decoder.context} others", call(), expected, limit)
    return Checked(worst, limit, f"one token after {decoder.context}, in float32")


def _wide(array: torch.Tensor) -> torch.Tensor:
    return array.float() if array.is_floating_point() else array
