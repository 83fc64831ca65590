"""Compiling Pallas kernels without a device: reports and failures."""

import pytest

pytest.importorskip("jax")
pytest.importorskip("triton")

import jax

from precondattn_kernel_tools.pallas_compiler import kernels_of
from precondattn_pallas import configurations, variants
from tests.kernel_tools.test_compilers import fits, report_of

OF_PALLAS = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from precondattn_kernel_tools.pallas_compiler import Variant

def call(kernel, size, **options):
    shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
    spec = pl.BlockSpec((size, size), lambda i: (0, 0))
    run = pl.pallas_call(
        kernel, grid=(1,), in_specs=(spec,), out_specs=spec, out_shape=shape, **options
    )
    return run, (shape,)

def square(x, out):
    out[...] = jnp.dot(x[...], x[...])

def sort(x, out):
    out[...] = jnp.sort(x[...])

def variants(target):
    options = {}
    if target != "tpu":
        options["compiler_params"] = plgpu.CompilerParams(num_warps=4, num_stages=1)
    yield Variant("fits", *call(square, 128 if target == "tpu" else 32, **options))
    yield Variant("has no such operation", *call(sort, 128, **options))
    yield Variant("has no kernel", jnp.sin, (jax.ShapeDtypeStruct((4,), jnp.float32),))
    if target != "tpu":
        yield Variant("spills", *call(square, 128, **options))
"""


@pytest.mark.thorough
def test_pallas_kernels_have_their_resources_or_are_failures(tmp_path):
    (tmp_path / "examples.py").write_text(OF_PALLAS)
    targets = ("--target=sm_80", "--target=tpu", "--jobs=1")
    done, result, rest = report_of(
        "pallas", tmp_path / "r.json", "examples", *targets, path=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert rest.keys() == {"jax", "triton", "python"}
    square = result["fits square", "sm_80"]
    fits(done, square, square["shared_bytes"])
    assert square["shared_bytes"] > 0
    assert result["fits square", "tpu"]["failures"] == []
    assert "bytes (at most 0)" in result["spills square", "sm_80"]["failures"][0]
    for target in ("sm_80", "tpu"):
        assert "sort" in result["has no such operation", target]["failures"][0]
        assert result["has no kernel", target]["failures"] == ["no kernel in it"]


@pytest.mark.thorough
def test_every_configuration_of_pallas_is_compiled_ahead_of_time(monkeypatch):
    compiled, look_up = set(), configurations.configuration

    def noted(kernel, width, half):
        cut = look_up(kernel, width, half)
        compiled.add((kernel, half, cut))
        return cut

    for module in ("softmax.attention", "recurrence.chunk_arrays", "lucid.solve", "lucid.step"):
        monkeypatch.setattr(f"precondattn_pallas.{module}.configuration", noted)
    result = list(variants.variants("sm_90"))
    assert len({variant.name for variant in result}) == len(result)
    for variant in result:
        jax.eval_shape(variant.function, *variant.arguments)
    # To lower all of them takes minutes, as the command does.
    chosen = [variant for variant in result if "softmax float32 64" in variant.name]
    assert [len(kernels_of(variant, "sm_90")) > 0 for variant in chosen] == 2 * [True]
    shipped = {(key.kernel, key.half, cut) for key, cut in configurations.REGISTRY.untuned.items()}
    assert shipped == compiled
