"""The work of LUCID's launches, most of which read parts of arrays: from the model of its kernels.

Super-blocks of tokens are solved one after another, with the same arrays. What such a launch reads
does not follow from its arguments; `precondattn_triton/work.py` mirrors its loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precondattn_gpu.headline_calls import BOTH, HEADS, STEP, WIDTH, HeadlineCall
from precondattn_kernel_tools.roof import KernelWork, Size

if TYPE_CHECKING:
    from precondattn_triton.configurations import Configuration

UNIT = 128
"""Tokens of the largest tile of LUCID's kernels."""


def bytes_of_parts(call: HeadlineCall) -> dict[str, int]:
    """The bytes of all launches of each kernel that reads parts of arrays; {} if there is none."""
    if call.mechanism != "lucid" or call.work == STEP:
        return {}
    size = Size(HEADS, call.tokens, WIDTH, WIDTH)

    def moved(name: str) -> int:
        return round(lucid_work(name, size).bytes)

    found = {name: moved(name) for name in ("update", "substitute")}
    if call.work == BOTH:
        found["update"] += moved("update with key sums")
        found["substitute"] *= 2
    return found


def lucid_work(name: str, size: Size) -> KernelWork:
    """The work of a kernel of LUCID's solve, or of its gradient, as configured for Hopper."""
    from precondattn_triton import work
    from precondattn_triton.lucid.plan import NARROWEST_SOLVER, super_block_of

    tile, least = configuration("lucid_inverse", size.d)[:2]
    block = super_block_of(size.tokens, least, UNIT)
    if name == "substitute":
        return work.substitute(size, tile, block, NARROWEST_SOLVER)
    if name == "key_gradient":
        return work.key_gradient(size, configuration("lucid_gradient", size.d), block)
    if name == "update":
        return work.update(size, configuration("lucid_update", size.d), block, tile)
    tiles = configuration("lucid_update_with_sums", size.d)
    return work.update(size, tiles, block, tile, key_sums=True)


def configuration(name: str, width: int) -> Configuration:
    """The configuration of a kernel on an H100, in 16 bits."""
    from precondattn_triton.configurations import REGISTRY

    return REGISTRY.find(name, width, True, architecture="sm_90")
