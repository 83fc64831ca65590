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

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.kernel_backend.kernel_table import lack_in
from precondattn_kernel_tools import ahead_of_time, pallas_compiler, tpu_compiler
from precondattn_kernel_tools.pallas_interpreter import RaceError, checked
from precondattn_pallas import variants
from precondattn_pallas.backend import KERNELS, TPU, kernels_of
from precondattn_pallas.tpu.products import TpuProducts
from tests.backends.pallas import test_gated_delta as test_pallas_gated_delta
from tests.backends.pallas import test_lucid as test_pallas_lucid
from tests.backends.pallas.tiles import BOUNDS, check, error, frame_of, quick, rounded


def check_on_a_tpu(leaf, x, cotangent, frame, dtype, bound=None):
    """Output and gradients."""
    with checked() as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)
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


def stacked(*problems):
    """Several problems of a leaf as the sequences of one call."""
    leaf, _, _ = problems[0]
    x = {name: np.concatenate([p[1][name] for p in problems]) for name in problems[0][1]}
    return leaf, x, np.concatenate([p[2] for p in problems])


def lucid(t, keys, **options):
    """A sequence for each kind of keys."""
    given = {"b": 1, "n": 1, **options}
    return stacked(*(test_pallas_lucid.problem(t, keys=kind, **given) for kind in keys))


def recurrence(leaf, t, kinds=(("random", "random"),), **options):
    """A sequence for each kind of keys and gates."""
    made = []
    for keys, gates in kinds:
        given = {"b": 1, "keys": keys, "gates": gates, **options}
        made.append((leaf, *test_pallas_gated_delta.problem(leaf, t, **given)))
    return stacked(*made)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("t", "dtype", "lengths", "segments"),
    [
        (257, "float32", (257, 256, 200, 0), (300, 100, 129, 300)),
        (127, "bfloat16", (127, 3, 127, 100), (30, 127, 50, 127)),
    ],
)
def test_lucid_around_a_block_with_keys_that_coincide_or_are_zero(t, dtype, lengths, segments):
    given = lucid(t, ("clustered", "equal", "zero", "clustered"), beta=True)
    check_on_a_tpu(*given, frame_of(t, t, 4, lengths=lengths, segments=segments), dtype)


def test_lucid_multiplies_no_blocks_of_other_segments():
    leaf, x, cotangent = lucid(384, ("clustered", "random"), n=2, beta=True)
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


def test_lucid_with_heads_wide_values_and_whole_blocks():
    given = lucid(256, ("clustered",), d=12, e=136, n=2, eps=0.0)
    check_on_a_tpu(*given, frame_of(256, 256, 1), "float32")


def test_lucid_with_keys_that_are_normalised_already():
    given = lucid(129, ("clustered",), normalize="given")
    check_on_a_tpu(*given, frame_of(129, 129, 1), "bfloat16")


def test_for_one_token_of_lucid_y_is_its_value():
    given = lucid(1, ("clustered",))
    check_on_a_tpu(*given, frame_of(1, 1, 1), "float32", 1e-6)


KINDS = (("random", "random"), ("clustered", "random"), ("equal", "extreme"), ("zero", "extreme"))


@pytest.mark.thorough
def test_gated_delta_around_a_chunk_with_extreme_gates_padding_and_segments():
    given = recurrence(pa.GatedDelta(), 257, KINDS, heads=(1, 2))
    frame = frame_of(257, 257, 4, lengths=(257, 256, 200, 257), segments=(300, 100, 300, 128))
    check_on_a_tpu(*given, frame, "float32")


@pytest.mark.thorough
def test_gated_delta_in_half_precision_with_wide_values():
    given = recurrence(pa.GatedDelta(), 127, (("random", "random"),), d=40, e=136)
    check_on_a_tpu(*given, frame_of(127, 127, 1), "bfloat16")


@pytest.mark.parametrize(
    ("leaf", "t", "dtype"),
    [(pa.Delta(), 1, "float32"), (pa.SSD(), 129, "bfloat16")],
    ids=str,
)
def test_special_cases_run_by_the_same_kernels(leaf, t, dtype):
    check_on_a_tpu(*recurrence(leaf, t), frame_of(t, t, 1), dtype)


def test_several_queries_that_read_one_state():
    leaf, x, cotangent = recurrence(pa.Linear(normalize=True), 20)
    x = {name: np.abs(a) if name in "qk" else a for name, a in x.items()}
    assert x["q"].shape[2] == 2 * x["k"].shape[2]
    check_on_a_tpu(leaf, x, cotangent, frame_of(20, 20, 1), "float32")


def test_contracted_queries_run_by_the_same_kernels():
    rng = np.random.default_rng(0)
    x = {"q": rng.normal(size=(1, 20, 4, 12)), "k": rng.normal(size=(1, 20, 2, 12))}
    x |= {"contraction": rng.uniform(size=(1, 20, 4)), "g": -np.abs(rng.normal(size=(1, 20, 4)))}
    check_output_on_a_tpu(pa.ConditionedQuery(decay="head"), x, "bfloat16")


def test_two_cores_that_share_the_heads():
    leaf, x, _ = lucid(129, ("clustered",), n=3)
    check_output_on_a_tpu(leaf, x, "float32", cores=2)


def test_an_extension_and_its_gradient():
    leaf = pa.GatedDelta()
    (key,) = leaf.program.slot_keys[0].values()
    _, x, cotangent = recurrence(leaf, 129)
    rng = np.random.default_rng(1)
    past, d_new = ({"state": rng.normal(size=(1, 4, 12, 20))} for _ in range(2))
    x, past, d_new = (
        {name: rounded(a, "float32") for name, a in arrays.items()} for arrays in (x, past, d_new)
    )
    given, exact = (
        [{name: a[i] for name, a in arrays.items()} for arrays in (x, past, d_new)] for i in (0, 1)
    )
    frame = frame_of(129, 129, 1)
    out, updates = leaf.step(exact[1], exact[0], frame)
    gradients, d_past = leaf.step_backward(exact[1], exact[0], frame, cotangent, exact[2])
    given[1:] = [{key: array["state"]} for array in given[1:]]
    with checked() as parameters:
        kernels = kernels_of(leaf, interpret=parameters, target=TPU)

        def run(x, past, d_new, d_out):
            frame = Frame(None, None)
            step = kernels.step(leaf, past, x, frame)
            return step, kernels.step_backward(leaf, past, x, frame, d_out, d_new)

        (result, new), (d_x, d_state) = quick(run)(*given, jnp.asarray(cotangent, dtype="float32"))
        jax.block_until_ready(d_x)
    assert error(result, out) < 2e-5
    assert error(new[key].value, updates["state"].value) < 2e-5
    assert error(d_state[key], d_past["state"]) < 4e-5
    for name, gradient in gradients.items():
        assert error(d_x[name], gradient) < 4e-5, name


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


def request(verb="vjp", **shapes):
    return Request(verb, "jax", "cpu", "float32", tuple(shapes.items()), frozenset())


@pytest.mark.parametrize(
    ("mechanism", "shapes", "reason"),
    [
        ("lucid_solve[window=3]", {}, "no window"),
        ("linear", {"q": (2, 20, 64, 256), "v": (2, 20, 2, 512)}, "32 queries to a state"),
        (
            "linear[normalize=true]",
            {"q": (2, 20, 12, 8), "k": (2, 20, 2, 256), "v": (2, 20, 2, 512)},
            "e=640",
        ),
        ("linear", {"k": (2, 20, 2, 264)}, "d=264"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(mechanism, shapes, reason):
    given = {"q": (2, 20, 2, 8), "k": (2, 20, 2, 8), "v": (2, 20, 2, 8)} | shapes
    leaf = pa.parse(mechanism).program.leaves[0]
    assert reason in kernels_of(leaf, interpret=True, target=TPU).refuses(leaf, request(**given))


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (pa.GLA(), "additive writes are not computed with a gate for each channel"),
        (pa.KDA(), "delta rules are not computed with a gate for each channel"),
        (pa.Comba(), "delta rules are not computed with an erase key that reads before the decay"),
        (pa.DeltaProduct(), "delta rules are not computed with an axis of 2 steps"),
        (pa.GSA(), "slots are not computed"),
    ],
)
def test_a_recurrence_without_kernels_for_a_tpu_is_declined_with_the_reason(leaf, reason):
    assert kernels_of(leaf, interpret=True, target=TPU) is None
    assert lack_in(KERNELS[TPU], leaf) == f": {reason}"


def test_other_pieces_have_no_kernels_for_a_tpu():
    group = Group(group_of("lucid"))
    for piece in (pa.Softmax(), pa.parse("laser").program.leaves[0], pa.Path(), group):
        assert kernels_of(piece, interpret=True, target=TPU) is None


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
for m, dtype in ((pa.Softmax(), "float32"), (pa.Linear(), "float16")):
    try:
        m(*(a.astype(dtype) for a in (q, k, v)), backend="pallas")
    except pa.UnsupportedError as error:
        print(error)
"""
    done = run_with_setting(code, "tpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["TpuRecurrence", "('pallas',)", "(1, 2, 3, 1, 4)"]
    assert "has no kernels for softmax on a TPU" in done.stdout
    assert "supports float32, bfloat16; found float16" in done.stdout


def test_a_device_that_it_has_no_kernels_for_is_an_error():
    code = "from precondattn_pallas.backend import target; target()"
    done = run_with_setting(code, "gpu")
    assert "must be one of cuda, tpu; found 'gpu'" in done.stderr
