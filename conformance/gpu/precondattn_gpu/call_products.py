"""The FLOPs of a whole call, counted without a GPU: Triton's interpreter runs the call's launches.

    TRITON_INTERPRET=1 python -m precondattn_gpu.call_products
        [--match TEXT] [--save FILE --column NAME]

The kernels have the grids and tiles that they have on an H100, at the full sizes of the headlines.
Heads have equal work, so a launch runs the programs of one head. Only products of tiles are
counted. No operator of PyTorch around the kernels is a product, but for PyTorch's own attention,
which is left out. Inputs are zeros, as those of `host_time`: all of LASER's heads are close.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer

from precondattn_gpu.headline_calls import CALLS, HEADS, HeadlineCall, ready


def main(
    match: Annotated[str, typer.Option(help="only calls whose name has this text")] = "",
    save: Annotated[Path | None, typer.Option(help="a JSON file to add the numbers to")] = None,
    column: Annotated[str, typer.Option(help="the name of these numbers in the file")] = "now",
) -> None:
    """Count the products of the calls of the headlines, and print or save them by kernel."""
    for call in CALLS:
        if match not in call.name:
            continue
        products = products_of(call)
        print(f"{call.name:44s} {sum(products.values()):.3g} {products}", flush=True)
        if save is not None:
            known = json.loads(save.read_text()) if save.exists() else {}
            known.setdefault(column, {})[call.name] = products
            save.write_text(json.dumps(known, indent=1) + "\n")


def products_of(call: HeadlineCall) -> dict[str, int]:
    """FLOPs of the products of a call, by kernel.

    Raises
    ------
    RuntimeError
        if Triton does not interpret kernels.
    """
    import torch

    from precondattn_gpu.absent_gpu import attention
    from precondattn_gpu.warm_calls import as_on_a_gpu
    from precondattn_kernel_tools.triton_products import counted_products

    with (
        as_on_a_gpu(),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        counted_products(of_heads=HEADS) as counted,
    ):
        run = ready(call, "cpu")
        counted.clear()
        run()
    return dict(sorted(counted.items()))


if __name__ == "__main__":
    typer.run(main)
