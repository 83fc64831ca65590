"""Compiles Pallas kernels without a GPU or TPU: do they compile, and do they fit?

    python -m precondattn_kernel_tools.pallas_compiler MODULE --target sm_90 --save FILE

`MODULE.variants(target)` yields the functions that a package ships for a target. JAX lowers each of
them for such a device. Every Pallas kernel in it is lowered to Triton's intermediate representation
and compiled to machine code, and its resources are read as in `triton_compiler.py`. For the target
`tpu` a kernel is lowered: this finds blocks of a wrong shape and unsupported operations, but not
whether it fits the memory. It is also compiled if a TPU's compiler, `libtpu`, is installed.

Kernels need explicit `compiler_params`, Triton's for a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from precondattn_kernel_tools import Foreign
from precondattn_kernel_tools.ahead_of_time import (
    CompileTask,
    key_of,
    no_variant,
    parsed,
    print_names,
    processes,
    run,
    selected,
    variants_of,
)
from precondattn_kernel_tools.resources import Resources, measured

TPU = "tpu"
DEVICES = {
    "sm_80": "NVIDIA A100",
    "sm_86": "NVIDIA A10",
    "sm_89": "NVIDIA L4",
    "sm_90": "NVIDIA H100",
    "sm_100": "NVIDIA B200",
    "sm_120": "NVIDIA RTX PRO 6000",
    TPU: "TPU v5e",
}
"""A device of each target, by JAX's name."""
TOPOLOGY = "v5e:2x2"
"""The smallest topology of that TPU; kernels are compiled for one chip of it."""
TARGETS = tuple(DEVICES)
TRITON_CALL, TPU_CALL = "xla.gpu.triton", "tpu_custom_call"
"""The names, or parts of the names, of calls of lowered kernels."""

Code = bytes | str
"""The code of a lowered kernel: bytes for Triton, text for a TPU."""
Options = tuple[tuple[str, int], ...]


class Variant(NamedTuple):
    """A function that launches kernels, as shipped."""

    name: str
    """A name that is unique in the module."""
    function: Callable[..., object]
    arguments: tuple[object, ...]
    """The arguments as `jax.ShapeDtypeStruct`s, or trees of them."""
    spill_limit: int = 0
    """The number of bytes that a thread may spill."""


class LoweredKernel(NamedTuple):
    """A lowered kernel of a variant."""

    name: str
    """The name of the variant followed by that of the kernel."""
    code: str
    """The code in Triton's intermediate representation; empty for a TPU."""
    options: Options
    """The options num_warps and num_stages."""
    spill_limit: int


def kernels_of(variant: Variant, target: str) -> list[LoweredKernel]:
    """The kernels that a variant launches on a target, in order, each once.

    Raises
    ------
    Exception
        that JAX raises if it can not lower a kernel, or not compile it for a TPU.
    """
    import jax

    platform = TPU if target == TPU else "cuda"
    is_compiled = target == TPU and importlib.util.find_spec("libtpu") is not None
    arguments = _on_a_chip(variant.arguments) if is_compiled else variant.arguments
    with _lowering_for(DEVICES[target], platform):
        traced = jax.jit(variant.function).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
    if is_compiled:
        lowered.compile()
    module = lowered.compiler_ir("stablehlo")
    names: dict[tuple[Code, Options], str] = {}
    for name, code, options in _calls(module, platform):
        names.setdefault((code, options), name)
    counts: Counter[str] = Counter()
    kernels = []
    for (code, options), name in names.items():
        counts[name] += 1
        number = f" {counts[name]}" if counts[name] > 1 else ""
        text = _as_text(code) if platform == "cuda" else ""
        full = f"{variant.name} {name}{number}"
        kernels.append(LoweredKernel(full, text, options, variant.spill_limit))
    return kernels


def _on_a_chip(arguments: tuple[object, ...]) -> Foreign:
    """The arguments on a TPU that is not here."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    machine = topologies.get_topology_desc(TOPOLOGY, platform="tpu")
    chip = SingleDeviceSharding(machine.devices[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip), arguments)


def _lowering_for(device: str, platform: str) -> AbstractContextManager[object]:
    """Context in which JAX lowers for a named device, which it requires from version 0.11 on."""
    import jax

    if jax.__version_info__ < (0, 10, 2):  # There, an abstract device has no platform.
        return nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    abstract = AbstractDevice(device, num_cores=1, platform=platform)
    mesh = AbstractMesh((), (), abstract_device=abstract)
    inside: AbstractContextManager[object] = use_abstract_mesh(mesh)
    return inside


def _calls(module: Foreign, platform: str) -> Iterator[tuple[str, Code, Options]]:
    """Name, code and options of each kernel call in a lowered module."""
    from jax._src.lib.mlir import ir

    operations = []

    def visit(operation: Foreign) -> object:
        if operation.name == "stablehlo.custom_call":
            operations.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in operations:
        target = str(operation.attributes["call_target_name"])
        if platform == "cuda" and TRITON_CALL in target:
            configuration = operation.attributes["mhlo.backend_config"]
            options = tuple(
                (name, ir.IntegerAttr(configuration[name]).value)
                for name in ("num_warps", "num_stages")
            )
            yield (
                ir.StringAttr(configuration["name"]).value,
                ir.StringAttr(configuration["ir"]).value_bytes,
                options,
            )
        elif platform == TPU and TPU_CALL in target:
            attributes = operation.attributes
            name = "kernel_name" if "kernel_name" in attributes else "call_target_name"
            yield ir.StringAttr(attributes[name]).value, str(operation), ()


def _as_text(code: Code) -> str:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    with mlir.make_ir_context() as context:
        dialect.register_dialect(context)
        text: str = ir.Module.parse(code).operation.get_asm(enable_debug_info=False)
    return text


def compile_kernel(kernel: LoweredKernel, target: str) -> Resources:
    """Compile a kernel for an NVIDIA GPU; a compiler error becomes a failure."""
    limit = kernel.spill_limit
    return measured(kernel.name, target, limit, lambda: _compiled(kernel, target))


def _compiled(kernel: LoweredKernel, target: str) -> Foreign:
    import triton
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder, triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # A cached kernel would take no time.
        path = Path(folder) / "kernel.ttir"
        path.write_text(kernel.code, encoding="utf-8")
        machine = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        return triton.compile(str(path), target=machine, options=dict(kernel.options))


class LoweredVariant(NamedTuple):
    """The kernels of a variant on a target."""

    variant: str
    target: str
    kernels: list[LoweredKernel]
    failure: str
    """Why it is not lowered, such as JAX's error; empty if it is."""


def lowered(module: str, match: str, target: str) -> list[LoweredVariant]:
    """The variants for a target whose names contain `match`, which a process can lower alone."""
    results = []
    for name, variant in variants_of(module, target).items():
        if match in name:
            kernels = list[LoweredKernel]()
            try:
                kernels = kernels_of(variant, target)
                failure = "" if kernels else "no kernel in it"
            except Exception as error:  # A compiler error is a result, not a fault here.
                failure = f"{type(error).__name__}: {error}"
            results.append(LoweredVariant(name, target, kernels, failure))
    return results


def tasks_of(variants: Iterable[LoweredVariant]) -> Iterator[CompileTask | Resources]:
    """Every kernel of each variant, in that order.

    A kernel that variants of one target share is compiled once. For a TPU, kernels are only
    lowered.
    """
    import jax
    import triton

    versions = jax.__version__, triton.__version__
    seen = set()
    for variant, target, kernels, failure in variants:
        if failure:
            yield Resources(variant, target, failures=[failure])
        for kernel in kernels:
            if target == TPU:
                yield Resources(kernel.name, target)
                continue
            key = key_of(kernel.code, kernel.options, kernel.spill_limit, target, *versions)
            if key not in seen:
                seen.add(key)
                yield CompileTask(kernel.name, target, key, (kernel, target))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each kernel, and return 1 if one of them fails."""
    import jax
    import triton

    parser, options = parsed("Pallas", TARGETS, "sm_90, tpu", arguments)
    if options.list:
        print_names(selected(parser, options))
        return 0
    with processes(min(options.jobs, len(options.target))) as pool:
        of_target = functools.partial(lowered, options.module, options.match)
        try:
            variants = [each for all_ in pool.map(of_target, options.target) for each in all_]
        except ValueError as error:
            parser.error(str(error))
    if not variants:
        parser.error(no_variant(options))
    versions = {"jax": jax.__version__, "triton": triton.__version__}
    return run(options, compile_kernel, tasks_of(variants), versions)


if __name__ == "__main__":
    sys.exit(main())
