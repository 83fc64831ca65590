"""The Pallas kernels for a TPU against the definition, interpreted, with checks for races."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precondattn.frame import Frame
from precondattn_kernel_tools import ahead_of_time, pallas_compiler, tpu_compiler
from precondattn_kernel_tools.pallas_interpreter import RaceError, checked
from precondattn_pallas import variants
from precondattn_pallas.backend import TPU, kernels_of
from precondattn_pallas.tpu.products import TpuProducts
from tests.backends.kernel_problems import error, leaf_of, problem
from tests.backends.pallas.tiles import (
    BOUNDS,
    check,
    check_extension,
    frame_of,
    quick,
    rounded,
)


def check_on_a_tpu(leaf, x, cotangent, dtype="float32", bound=None, **masks):
    """Output and gradients."""
    with checked() as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)
        frame = frame_of(x["k"].shape[1], x["k"].shape[1], len(x["k"]), **masks)
        check(kernels, leaf, x, cotangent, frame, dtype, bound or BOUNDS[dtype])


def check_output_on_a_tpu(leaf, x, dtype, cores=1):
    """The output of a call without masks."""
    given, exact = ({name: rounded(a, dtype)[i] for name, a in x.items()} for i in (0, 1))
    t = x["k"].shape[1]
    expected, _ = leaf.forward(exact, frame_of(t, t, x["k"].shape[0]))
    with checked(cores=cores) as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)
        result = quick(lambda x: kernels.forward(leaf, x, Frame(None, None))[0])(given)
        jax.block_until_ready(result)
    assert error(result, expected) < BOUNDS[dtype]


def stacked(leaf, t, *kinds, **sizes):
    """A sequence for each kind of keys and gates, in one call."""
    leaf = leaf_of(leaf)
    made = [problem(leaf, t, **kind, **sizes) for kind in kinds or ({},)]
    x = {name: np.concatenate([given[name] for given, _ in made]) for name in made[0][0]}
    return leaf, x, np.concatenate([cotangent for _, cotangent in made])


BETA = "lucid_solve[beta=true]"
CLUSTERED, EQUAL, ZERO = ({"keys": kind} for kind in ("clustered", "equal", "zero"))
EXTREME = {"gates": "extreme"}
FOUR = (CLUSTERED, EQUAL, ZERO, CLUSTERED)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                (
                    (BETA, 257, *FOUR),
                    {"lengths": (257, 256, 200, 0), "segments": (300, 100, 129, 300)},
                ),
                (
                    (BETA, 127, *FOUR),
                    {
                        "dtype": "bfloat16",
                        "lengths": (127, 3, 127, 100),
                        "segments": (30, 127, 50, 127),
                    },
                ),
                (
                    ("gated_delta", 257, {}, CLUSTERED, EQUAL | EXTREME, ZERO | EXTREME),
                    {"lengths": (257, 256, 200, 257), "segments": (300, 100, 300, 128)},
                ),
                (("gated_delta", 127, {"d": 40, "e": 136}), {"dtype": "bfloat16"}),
            )
        ),
        (("lucid_solve[eps=0]", 256, {"e": 136, "n": 2, **CLUSTERED}), {}),
        (("lucid_solve[normalize=given]", 129, CLUSTERED), {"dtype": "bfloat16"}),
        (("lucid_solve", 1, CLUSTERED), {"bound": 1e-6}),  # Its output is its value.
        (("delta", 1), {}),
        (("ssd", 129), {"dtype": "bfloat16"}),
        (("linear[normalize=true]", 20, {"h": 4, "n": 2}), {}),  # Two queries read one state.
    ],
    ids=lambda value: f"{value[0]}-{value[1]}" if isinstance(value, tuple) else "",
)
def test_output_and_gradients_are_those_of_the_definition(made, options):
    check_on_a_tpu(*stacked(*made), **options)


def test_lucid_multiplies_no_blocks_of_other_segments():
    leaf, x, cotangent = stacked(BETA, 384, CLUSTERED, {}, n=2)
    x, cotangent = ({n: a.astype("float32") for n, a in x.items()}, cotangent.astype("float32"))
    segment = np.arange(384)[None].repeat(2, axis=0) // 128
    segment[1] = np.arange(384) >= 256  # Its first segment has two blocks.
    bad = {0: slice(128, 256), 1: slice(256, 384)}
    for sequence, tokens in bad.items():
        x["v"][sequence, tokens], cotangent[sequence, tokens] = np.nan, np.nan
    with checked() as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)

        def run(x, segment, cotangent):
            frame = Frame(None, None, k_segment=segment)
            y, residuals = kernels.forward(leaf, x, frame)
            return y, kernels.backward(leaf, x, frame, y, residuals, cotangent)

        y, gradients = quick(run)(x, jnp.asarray(segment), cotangent)
        for name, array in {"y": y, **gradients}.items():
            for sequence, tokens in bad.items():
                is_bad = np.isnan(array[sequence]).reshape(384, -1).any(axis=1)
                assert not np.delete(is_bad, np.arange(384)[tokens]).any(), name


def test_contracted_queries_run_by_the_same_kernels():
    leaf, x, _ = stacked("conditioned_query[decay=head]", 20, {"h": 4, "n": 2})
    check_output_on_a_tpu(leaf, x, "bfloat16")


def test_two_cores_that_share_the_heads():
    leaf, x, _ = stacked("lucid_solve", 129, {"n": 3, **CLUSTERED})
    check_output_on_a_tpu(leaf, x, "float32", cores=2)


def test_an_extension_and_its_gradient():
    leaf, x, cotangent = stacked("gated_delta", 129, {"h": 4, "n": 2})
    with checked() as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)
        check_extension(kernels, leaf, x, cotangent)


def test_factors_in_two_terms_keep_16_bits():
    a, b = np.random.default_rng(0).normal(size=(2, 64, 64)).astype("float32")
    size = np.abs(a).astype("float64") @ np.abs(b)
    for left, right in ((a, b), (jnp.asarray(a, dtype="bfloat16"), b)):
        result = TpuProducts(half=True).dot(jnp.asarray(left), jnp.asarray(right))
        exact = np.asarray(left).astype("float64") @ right
        assert (np.abs(np.asarray(result) - exact) < 2**-15 * size).all()


def copy_and_read(x, out, scratch, semaphore, *, wait):
    """Reads the destination of a copy before or after waiting for it."""
    copy = pltpu.make_async_copy(x, scratch, semaphore)
    copy.start()
    if wait:
        copy.wait()
    out[...] = scratch[...]
    if not wait:
        copy.wait()


@pytest.mark.parametrize("wait", [True, False])
def test_a_race_is_an_error(wait, capfd, caplog):
    def run(parameters):
        shape = (8, 128)
        result = pl.pallas_call(
            lambda *refs: copy_and_read(*refs, wait=wait),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32), pltpu.SemaphoreType.DMA],
            interpret=parameters,
        )(jnp.ones(shape, jnp.float32))
        return np.asarray(result)

    if wait:
        with checked() as parameters:
            assert (run(parameters) == 1).all()
    else:
        with pytest.raises(RaceError, match="1 of 1"), checked() as parameters:
            run(parameters)
        assert "RACE DETECTED" in capfd.readouterr().out + caplog.text


def test_cores_that_write_the_same_memory_are_a_race(capfd, caplog):
    def number(out):
        out[...] = jnp.full(out.shape, pl.program_id(0), jnp.float32)

    def run(parameters):
        shape = (8, 128)
        result = pl.pallas_call(
            number,
            grid=(2,),
            out_specs=pl.BlockSpec(shape, lambda i: (jnp.int32(0), jnp.int32(0))),
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=parameters,
        )()
        jax.block_until_ready(result)

    with pytest.raises(RaceError), checked(cores=2) as parameters:
        run(parameters)
    assert "RACE DETECTED" in capfd.readouterr().out + caplog.text


def test_a_check_without_kernels_is_an_error():
    with pytest.raises(RuntimeError, match="nothing was checked"), checked():
        pass


@pytest.mark.thorough
def test_every_variant_for_a_tpu_can_be_lowered():
    """Variants can be lowered with 64 bits enabled, as in all of these tests."""
    names = set()
    for variant in ahead_of_time.variants_of(variants.__name__, TPU).values():
        kernels = pallas_compiler.kernels_of(variant, TPU)
        assert kernels, variant.name
        names |= {kernel.name.removeprefix(f"{variant.name} ") for kernel in kernels}
    assert names == {"substitute", "key_gradient", "forward", "backward"}


def test_a_tpus_compiler_that_is_not_installed_is_an_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(SystemExit):
        tpu_compiler.main([variants.__name__, "--match=gated_delta float32 128"])
    assert "a TPU's compiler is in libtpu" in capsys.readouterr().err


def run_with_setting(code, setting):
    environment = {**os.environ, "PRECONDATTN_PALLAS_INTERPRET": setting}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_an_environment_variable_selects_the_target_of_interpreted_kernels():
    code = """
import jax, jax.numpy as jnp, precondattn as pa
from precondattn_pallas.backend import Pallas
q = k = v = jnp.ones((2, 3, 1, 4), jnp.float32)
g = beta = jnp.zeros((2, 3, 1), jnp.float32)
m = pa.GatedDelta()
print(type(Pallas().kernels(m)).__name__)
print(m.explain(q, k, v, g=g, beta=beta, backend="pallas").backends)
loss = lambda v: jnp.sum(m(q, k, v, g=g, beta=beta + 1, backend="pallas"))
print(jax.jit(jax.vmap(jax.grad(loss)))(v[None]).shape)
"""
    done = run_with_setting(code, "tpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["TpuRecurrence", "('pallas',)", "(1, 2, 3, 1, 4)"]


def test_a_device_that_it_has_no_kernels_for_is_an_error():
    code = "from precondattn_pallas.backend import target; target()"
    done = run_with_setting(code, "gpu")
    assert "must be one of cuda, tpu; found 'gpu'" in done.stderr
