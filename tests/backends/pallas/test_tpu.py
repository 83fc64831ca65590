"""The Pallas kernels for a TPU against the definition, interpreted, with checks for races."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precondattn_kernel_tools import ahead_of_time, pallas_compiler
from precondattn_kernel_tools.pallas_interpreter import RaceError, checked
from precondattn_pallas import variants
from precondattn_pallas.backend import TPU, kernels_of
from precondattn_pallas.tpu.products import TpuProducts
from tests.backends.kernel_problems import (
    frame_of,
    leaf_of,
    problem,
    require_same_beside_nan,
    row,
)
from tests.backends.pallas.tiles import (
    BOUNDS,
    check,
    check_extension,
    run,
)


def check_on_a_tpu(leaf, x, cotangent, dtype="float32", bound=None, cores=1, **masks):
    """Output and gradients."""
    with checked(cores=cores) as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)
        frame = frame_of(x["k"].shape[1], x["k"].shape[1], len(x["k"]), **masks)
        check(kernels, leaf, x, cotangent, frame, dtype, bound or BOUNDS[dtype])


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


LENGTHS = (257, 256, 200, 0)
ROWS = (
    (("lucid_solve[eps=0]", 256, {"e": 136, "n": 2, **CLUSTERED}), {}),
    (("lucid_solve[normalize=given]", 129, CLUSTERED), {"dtype": "bfloat16"}),
    (("gated_delta", 129, {"h": 4, "n": 2}), {}),  # Two queries read one state.
    (("linear[normalize=true]", 20, {}), {"dtype": "bfloat16"}),
)
LATER = (
    ((BETA, 257, *FOUR), {"lengths": LENGTHS, "segments": (300, 100, 129, 300)}),
    (
        (BETA, 127, *FOUR),
        {"dtype": "bfloat16", "lengths": (127, 3, 127, 100), "segments": (30, 127, 50, 127)},
    ),
    (
        ("gated_delta", 257, {}, CLUSTERED, EQUAL | EXTREME, ZERO | EXTREME),
        {"lengths": (257, 256, 200, 257), "segments": (300, 100, 300, 128)},
    ),
    (("gated_delta", 127, {"d": 40, "e": 136}), {"dtype": "bfloat16"}),
    (("lucid_solve", 129, {"n": 3, **CLUSTERED}), {"cores": 2}),
    (("lucid_solve", 1, CLUSTERED), {"bound": 1e-6}),  # Its output is its value.
    (("delta", 1), {}),
    (("ssd", 129), {"dtype": "bfloat16"}),
    (("conditioned_query[decay=head]", 20, {"h": 4, "n": 2}), {"dtype": "bfloat16"}),
)


@pytest.mark.parametrize(
    ("made", "options"),
    [*ROWS, *(pytest.param(*each, marks=pytest.mark.thorough) for each in LATER)],
    ids=lambda value: f"{value[0]}-{value[1]}" if isinstance(value, tuple) else "",
)
def test_output_and_gradients_are_those_of_the_definition(made, options):
    check_on_a_tpu(*stacked(*made), **options)


@pytest.mark.thorough
def test_lucid_multiplies_no_blocks_of_other_segments():
    ids = np.repeat(np.arange(3), (128, 128, 128))[None]
    made = row("", BETA, 384, keys="clustered", n=2, masks={"ids": ids})
    with checked() as parameters:
        kernels = kernels_of(made.values[0].leaf, interpret=parameters, target=TPU)
        require_same_beside_nan(kernels, made.values[0], ids, run)


@pytest.mark.thorough
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


def copy_and_read(x, out, scratch, semaphore):
    """Reads the destination of a copy before it waits for the copy."""
    copy = pltpu.make_async_copy(x, scratch, semaphore)
    copy.start()
    out[...] = scratch[...]
    copy.wait()


def raced(parameters):
    shape = (8, 128)
    result = pl.pallas_call(
        copy_and_read,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=parameters,
    )(jnp.ones(shape, jnp.float32))
    return np.asarray(result)


def test_a_race_is_an_error_and_so_is_a_check_without_kernels(capfd, caplog):
    with pytest.raises(RaceError, match="1 of 1"), checked() as parameters:
        raced(parameters)
    assert "RACE DETECTED" in capfd.readouterr().out + caplog.text
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
