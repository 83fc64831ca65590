"""Compiles Pallas kernels without a TPU: do they compile, and do they fit its VMEM?

    python -m precondattn_kernel_tools.tpu_compiler MODULE --chip v5e

A TPU's compiler is in the package `libtpu`, in the version that JAX's extra `tpu` requires. It
needs no TPU, but is large, and nothing else here uses it. `MODULE.variants("tpu")` gives the
functions that a package ships, as for `pallas_compiler.py`, which only lowers them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from precondattn_kernel_tools.ahead_of_time import variants_of
from precondattn_kernel_tools.pallas_compiler import TPU, Variant, lowering_for

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The smallest topology of each chip; kernels are compiled for one chip of it."""


def compiler_for(chip: str) -> Callable[[Variant], str]:
    """A function that compiles a variant's kernels for a chip and returns the error, or "".

    Raises
    ------
    ImportError
        if `libtpu` is not installed.
    """
    try:
        importlib.import_module("libtpu")
    except ModuleNotFoundError as missing:
        raise ImportError(
            "a TPU's compiler is in libtpu: pip install the version that jax[tpu] requires"
        ) from missing
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    machine = topologies.get_topology_desc(CHIPS[chip], platform="tpu")
    sharding = SingleDeviceSharding(machine.devices[0])

    def on_the_chip(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def compile_variant(variant: Variant) -> str:
        try:
            with lowering_for(f"TPU {chip}", TPU):
                arguments = jax.tree.map(on_the_chip, variant.arguments)
                traced = jax.jit(variant.function).trace(*arguments)
                lowered = traced.lower(lowering_platforms=(TPU,))
            lowered.compile()
        except Exception as error:  # A compiler error is a result, not a fault.
            return f"{type(error).__name__}: {error}"
        return ""

    return compile_variant


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each variant, and return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description="Compile a package's Pallas kernels for a TPU.")
    parser.add_argument("module", help='the module whose variants("tpu") are compiled')
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--match", default="", help="only variants whose name contains this")
    options = parser.parse_args(arguments)
    chosen = [v for v in variants_of(options.module, TPU).values() if options.match in v.name]
    if not chosen:
        parser.error(f"{options.module} has no variant with {options.match!r} in its name")
    try:
        compile_variant = compiler_for(options.chip)
    except ImportError as error:
        parser.error(str(error))
    failed = False
    for variant in chosen:
        start = time.perf_counter()
        failure = compile_variant(variant)
        print(f"{options.chip:4s} {time.perf_counter() - start:7.2f} s  {variant.name}", flush=True)
        if failure:
            print(textwrap.indent(failure, "    "), flush=True)
        failed = failed or bool(failure)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
