"""Prints the kernels of the listed variants that the smallest calls do not launch."""

import torch

from precondattn_gpu import call as of_gpu
from precondattn_gpu import shipped
from precondattn_triton import variants


def launched(
    call: shipped.ShippedCall, tokens: int, batch: int, heads: int
) -> set[tuple[object, ...]]:
    """The properties that distinguish the launches of a call, as in the list of variants."""
    variants.TOKENS, variants.BATCH, variants.HEADS = tokens, batch, heads
    dtype = getattr(torch, call.dtype)
    with variants.compiling_for("sm_90"):
        launches = variants.launches(call.mechanism, dtype, call.d, call.e, call.is_step)
    return {
        (
            launch.function.__name__,
            *(str(launch.arguments.get(name)) for name in variants.DISTINGUISHING),
            str(sorted(launch.options.items())),
            call.dtype,
        )
        for launch in launches
    }


def main() -> None:
    few, many = set(), set()
    for each in shipped.calls("triton"):
        many |= launched(each, 4096, 2, 16)
        few |= launched(each, each.tokens, of_gpu.BATCH, of_gpu.HEADS)
    assert len(many) > 400, len(many)
    print("missing:", sorted(many - few))


if __name__ == "__main__":
    main()
