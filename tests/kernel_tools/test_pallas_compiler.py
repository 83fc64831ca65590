"""Compiling Pallas kernels without a device: reports and failures."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")
pytest.importorskip("triton")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from precondattn_kernel_tools import pallas_compiler
from precondattn_kernel_tools.resources import SHARED_LIMITS
from precondattn_pallas import configurations, variants

EXAMPLES = """
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


def compiler(*arguments, path="."):
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "precondattn_kernel_tools.pallas_compiler", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=path,
        env=without,
    )


@pytest.mark.thorough
def test_a_kernel_that_fits_has_its_resources_and_one_that_does_not_is_a_failure(tmp_path):
    (tmp_path / "examples.py").write_text(EXAMPLES)
    done = compiler(
        "examples",
        "--target=sm_80",
        "--target=tpu",
        "--jobs=1",
        "--save=report.json",
        path=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"jax", "triton", "python", "variants"}
    result = {(v["name"], v["target"]): v for v in report["variants"]}
    fits = result["fits square", "sm_80"]
    assert fits["failures"] == []
    assert 0 < fits["registers"] <= 255
    assert fits["shared_bytes"] > 0
    assert result["fits square", "tpu"]["failures"] == []
    assert "bytes (at most 0)" in result["spills square", "sm_80"]["failures"][0]
    for target in ("sm_80", "tpu"):
        assert "sort" in result["has no such operation", target]["failures"][0]
        assert result["has no kernel", target]["failures"] == ["no kernel in it"]


def _double(x, out):
    out[...] = 2 * x[...]


@pytest.mark.parametrize("target", pallas_compiler.TARGETS)
def test_jax_lowers_for_every_target_without_a_device(target):
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    options = {"compiler_params": plgpu.CompilerParams()} if target != "tpu" else {}
    run = pl.pallas_call(_double, out_shape=shape, **options)
    (kernel,) = pallas_compiler.kernels_of(pallas_compiler.Variant("twice", run, (shape,)), target)
    assert kernel.name == "twice _double"
    assert ("tt.func" in kernel.code) == (target != "tpu")


def test_every_nvidia_target_has_a_device():
    nvidia = {target for target in SHARED_LIMITS if target.startswith("sm_")}
    assert {*pallas_compiler.TARGETS} == {*nvidia, "tpu"}


@pytest.mark.thorough
def test_some_variants_of_the_shipped_kernels_compile():
    """The command compiles all of them, which takes minutes."""
    chosen = "softmax float32 64"
    done = compiler(
        "precondattn_pallas.variants", "--target=sm_90", f"--match={chosen}", "--jobs=1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(chosen)[2].strip() for line in done.stdout.splitlines()] == [
        "forward",
        "backward key_gradient",
        "backward query_gradient",
    ]


@pytest.mark.thorough
def test_every_configuration_is_compiled_ahead_of_time(monkeypatch):
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
    shipped = {(key.kernel, key.half, cut) for key, cut in configurations.REGISTRY.untuned.items()}
    assert shipped == compiled
