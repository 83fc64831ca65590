"""The Triton calls of the first run, made without a GPU; they launch the same kernels as on one.

Tensors have shapes and no memory, except in steps: a cache of such tensors would have another
layout. Launches are not run, so the results are meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import precondattn as pa
from precondattn.cache.known_lengths import remembered
from precondattn.execution import preparation
from precondattn_gpu import call as of_gpu
from precondattn_gpu import shipped
from precondattn_gpu.alive_parts import is_first, turn
from precondattn_gpu.first_headline import HEADLINES
from precondattn_gpu.options import HELPER

if TYPE_CHECKING:
    import torch

    from precondattn_conformance.inputs import CallLayout

BACKEND = "triton"
TARGET = "sm_90"
BRIEF = 256
"""The most tokens of the second cache with which a step is compared (`check_decode`)."""
PREFILL = 1024
"""The number of tokens of one call that fills a cache (`CacheDecoder`)."""


class WarmCall(NamedTuple):
    """A call with its gradient, or a step after a cache."""

    mechanism: str
    dtype: str
    layout: CallLayout
    is_step: bool = False
    backends: tuple[str, ...] = (BACKEND, HELPER[BACKEND])

    @property
    def name(self) -> str:
        size = self.layout
        sizes = f"b={size.b},t={size.t},h={size.h},n={size.n},d={size.d},e={size.e}"
        return f"{self.mechanism} {self.dtype} {sizes}{' step' if self.is_step else ''}"


def works(match: str = "") -> list[WarmCall]:
    """All calls, in the order of the first run."""
    calls = shipped.calls(BACKEND)
    later = sorted((call for call in calls if not is_first(call)), key=turn)
    everything = [*of_part_a(), *_of_headlines(), *map(of_alive, later)]
    return [work for work in dict.fromkeys(everything) if match in work.name]


def of_part_a() -> list[WarmCall]:
    """The calls of `alive` in part A."""
    return [of_alive(call) for call in shipped.calls(BACKEND) if is_first(call)]


def of_alive(call: shipped.ShippedCall) -> WarmCall:
    """The call, or step, for a call of the stage `alive`."""
    layout = of_gpu.layout_of(call.d, call.e, call.tokens)
    if call.is_step:
        return WarmCall(call.expression, call.dtype, layout, is_step=True)
    backends = of_gpu.backends_of(BACKEND, call.expression)
    return WarmCall(call.expression, call.dtype, layout, backends=backends)


def _of_headlines() -> Iterator[WarmCall]:
    """The timed calls. A step has one token more than its context (`timed_call`)."""
    from precondattn_conformance.bench.cases import layout
    from precondattn_conformance.bench.selection import with_sizes

    for each in HEADLINES:
        if each.backend == BACKEND:
            sizes = with_sizes(layout(), each.sizes)._replace(name="headline")
            is_step = "decode" in each.works
            more = sizes._replace(t=sizes.t + is_step, s=sizes.s + is_step)
            yield WarmCall(each.mechanism, "bfloat16", more, is_step)


def run(work: WarmCall) -> None:
    """Launch the call's kernels, inside `as_on_a_gpu`."""
    if work.is_step:
        _steps(work)
    else:
        _call(work)


def _call(work: WarmCall) -> None:
    """Make a call with its gradient on meta tensors, which have shapes and no memory."""
    import torch

    mechanism = pa.parse(work.mechanism)
    inputs = _inputs(work, work.layout.t, "meta")
    with torch.no_grad():
        mechanism(**inputs, backend=work.backends)
    out, pullback = mechanism.vjp(**inputs, backend=work.backends)
    pullback(torch.empty_like(out))


def _steps(work: WarmCall) -> None:
    """Fill a cache in parts, and extend it by one token, as `CacheDecoder` does.

    A cache of meta tensors would have another layout.
    """
    import torch

    mechanism = pa.parse(work.mechanism)
    token = _inputs(work, 1, "cpu")
    for tokens in {work.layout.t, min(work.layout.t, BRIEF)}:
        context = tokens - 1
        parts = [(at, min(PREFILL, context - at)) for at in range(0, context, PREFILL)]
        for at, count in dict.fromkeys((*parts[:2], *parts[-1:], (context, 1))):
            new = _inputs(work, count, "cpu")
            cache = mechanism.init_cache(**token, capacity=tokens)
            cache = cache._replace(length=remembered(torch.full_like(cache.length, at), at))
            # Mesa reads whether its query is solved from memory that no kernel has written.
            with torch.no_grad(), suppress(pa.NotSolvedError):
                mechanism.extend(cache, **new, backend=work.backends, donate=True)


def _inputs(work: WarmCall, tokens: int, device: str) -> dict[str, torch.Tensor]:
    import torch

    sizes = {**work.layout.sizes, "t": tokens, "s": tokens}
    return {
        name: torch.zeros(pattern.shape(sizes), dtype=getattr(torch, work.dtype), device=device)
        for name, pattern in pa.parse(work.mechanism).inputs.items()
    }


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Context in which the backend accepts tensors off the GPU, and calls read none of them."""
    from precondattn_triton.backend import Triton
    from precondattn_triton.target import compiling_for

    with (
        patch.object(Triton, "refuses_request", lambda *_: None),
        patch.object(preparation, "READ_AT_ONCE", ()),
        compiling_for(TARGET),
    ):
        yield
