"""Prints the kernels of the listed variants that the smallest calls do not launch."""

import torch

from precondattn_gpu import call as of_gpu
from precondattn_gpu import shipped
from precondattn_triton import variants
from precondattn_triton.configurations import REGISTRY


def launched(
    call: shipped.ShippedCall, tokens: int, batch: int, heads: int
) -> set[tuple[object, ...]]:
    """The properties that distinguish the launches of a call, as in the list of variants."""
    variants.TOKENS, variants.BATCH, variants.HEADS = tokens, batch, heads
    dtype = getattr(torch, call.dtype)
    with variants.compiling_for("sm_90"):
        launches = variants.launches(call.mechanism, dtype, call.d, call.e, int(call.is_step))
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
    # LUCID's update sums keys only with as many programs as there are multiprocessors: the calls of
    # the headlines launch it.
    found = [
        REGISTRY.find("lucid_update_with_sums", width, half, architecture="sm_90")
        for width in (64, 128, 256)
        for half in (True, False)
    ]
    summing = {(str(tiles.rows), str(tiles.columns)) for tiles in found}
    missing = {each for each in many - few if not (each[0] == "update" and each[1:3] in summing)}
    print("missing:", sorted(missing))


if __name__ == "__main__":
    main()
