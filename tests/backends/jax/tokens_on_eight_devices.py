"""The layouts of `context_parallel` that divide tokens in JAX, on 2, 4 and 8 devices.

`test_parallel.py` runs these tests in a process of its own.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import precondattn as pa
from precondattn.parallel.jax import context_parallel, solve
from precondattn.parallel.layouts import to_layout
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.representatives import SCANNED

WITHIN = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}
"""Tolerances, relative to the largest entry"""


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def short_blocks(monkeypatch):
    """Several blocks of a solve in each part, of which the last may be shorter."""
    monkeypatch.setattr(solve, "BLOCK", 2)


def mesh_of(devices, kind=AxisType.Auto):
    return jax.make_mesh((devices,), ("cp",), axis_types=(kind,), devices=jax.devices()[:devices])


def problem(expression, tokens, kind="clustered", **sizes):
    m = pa.parse(expression)
    return m, make_inputs(m, CallLayout("test", t=tokens, s=tokens, **sizes), kind)


def masks_of(names, tokens, bounds=None):
    """Two sequences: segments that cross devices, and one of them shorter.

    In the second sequence each segment ends a token earlier.
    """
    bounds = [1, tokens // 2 + 1, tokens - 2] if bounds is None else bounds
    each = np.arange(tokens) + np.arange(2)[:, None]
    made = {
        "lengths": np.asarray([tokens - 3, tokens // 3]),
        "key_mask": np.arange(2 * tokens).reshape(2, tokens) % 5 != 1,
        "segment_ids": np.searchsorted(bounds, each, side="right"),
    }
    return {name: made[name] for name in names}


def of_padding(masks, pattern, tokens):
    """The tokens of an input that nothing reads (2, tokens)."""
    hidden = np.zeros((2, tokens), bool)
    if "lengths" in masks:
        hidden |= np.arange(tokens) >= masks["lengths"][:, None]
    if "key_mask" in masks and "t" not in pattern.letters:
        hidden |= ~masks["key_mask"]
    return hidden


def divided(x, layout, devices, axis=1):
    """An array with its tokens in the order of the devices."""
    return x if axis is None else to_layout(x, layout, devices, axis)


def require_near(found, expected, what, tolerance):
    found = np.asarray(found, dtype=np.float64)
    assert np.all(np.isfinite(found)), what
    error = abs(found - expected).max() / max(1.0, abs(expected).max())
    assert error < tolerance, f"{what}: {error:.2e}"


def check(
    expression,
    layout,
    devices,
    each,
    masks=(),
    dtype="float64",
    kind="clustered",
    bounds=None,
    **sizes,
):
    """Output and gradients, of tokens that are divided, are those of NumPy on all of them."""
    tokens = devices * each
    m, x = problem(expression, tokens, kind, **sizes)
    x = {name: np.array(jnp.asarray(a, dtype), np.float64) for name, a in x.items()}
    masks = masks_of(masks, tokens, bounds)
    expected, pull = m.vjp(**x, **masks)
    weight = np.linspace(-1, 1, expected.size).reshape(expected.shape)
    of_one = pull(weight)
    for name, pattern in m.inputs.items():  # Padding is not read.
        if pattern.time_axis is not None and pattern.axes[pattern.time_axis].multiple == 1:
            x[name][of_padding(masks, pattern, tokens)] = np.nan

    times = {name: pattern.time_axis for name, pattern in m.inputs.items()}
    given = {n: jnp.asarray(divided(a, layout, devices, times[n]), dtype) for n, a in x.items()}
    of_tokens = {
        n: jnp.asarray(a if n == "lengths" else divided(a, layout, devices))
        for n, a in masks.items()
    }
    attn = context_parallel(m, mesh_of(devices), "cp", layout=layout)
    d_out = jnp.asarray(divided(weight, layout, devices))

    @jax.jit
    def value(x):
        out = attn(**x, **of_tokens)
        return (out * d_out).sum(), out

    (_, out), gradients = jax.value_and_grad(value, has_aux=True)(given)
    assert out.dtype == dtype
    assert out.sharding.spec[1] == "cp"
    require_near(out, divided(expected, layout, devices), "the output", WITHIN[dtype])
    for name, gradient in gradients.items():
        true = divided(of_one[name], layout, devices, times[name])
        require_near(gradient, true, f"the gradient of {name}", WITHIN[dtype])


def test_keys_go_around_with_padding_in_float32():
    check(
        "softmax[softcap=5,scale=0.3]",
        "zigzag",
        8,
        6,
        masks=("lengths", "key_mask"),
        dtype="float32",
    )


def test_keys_of_packed_segments_go_around_in_many_parts():
    check("softmax", "cyclic[block=3]", 2, 6, masks=("segment_ids",))


def test_keys_of_laser_go_around():
    check("laser", "contiguous", 2, 5)


def test_weights_of_pieces_before_a_ring_get_their_gradient():
    check("temperature[per=head](softmax[causal=false])", "contiguous", 2, 5, n=4)


def test_half_precision_goes_around_and_is_computed_in_float32():
    check("softmax", "contiguous", 2, 5, dtype="bfloat16", kind="random")


def test_half_precision_is_float32_between_pieces_that_send_no_values():
    m, x = problem("qk_norm(linear)", 10, h=4, n=4)
    x = {name: jnp.asarray(a, "bfloat16") for name, a in x.items()}
    attn = jax.jit(context_parallel(m, mesh_of(2), "cp", layout="contiguous").__call__)
    exact = attn(**{name: a.astype("float32") for name, a in x.items()})
    once = exact.astype("bfloat16")
    found = attn(**x)
    assert found.dtype == "bfloat16"
    assert np.array_equal(found, once)  # The result is rounded once, at the end.


def test_states_are_scanned_and_multiplied_by_transitions():
    check("gated_delta", "contiguous", 4, 5, masks=("lengths",), h=4, n=4)


@pytest.mark.parametrize(
    ("expression", "masks", "bounds"),
    [
        ("gated_delta", ("segment_ids", "key_mask"), [5, 18]),
        pytest.param("ccq(gla)", ("segment_ids", "lengths"), [2, 7, 12], marks=pytest.mark.slow),
        pytest.param("linear", ("segment_ids",), [5], marks=pytest.mark.slow),
        pytest.param("kda", ("segment_ids",), [3], marks=pytest.mark.slow),
        pytest.param("mesa(ssd)", ("segment_ids", "key_mask"), [5], marks=pytest.mark.slow),
        pytest.param("gsa", ("segment_ids",), [2, 16], marks=pytest.mark.slow),
        pytest.param("atk(gated_delta)", ("segment_ids",), [5, 10], marks=pytest.mark.slow),
        pytest.param("dplr", ("segment_ids",), [5], marks=pytest.mark.slow),
    ],
)
def test_states_of_packed_segments_are_scanned(expression, masks, bounds):
    check(expression, "contiguous", 4, 5, masks=masks, bounds=bounds, h=4, n=4)


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["gated_delta", "ccq(gla)"])
def test_a_state_that_is_nan_spoils_its_own_segment_only(expression):
    m, x = problem(expression, 20, h=4, n=4)
    x["k"][0, 4, 0] = np.nan
    masks = masks_of(("segment_ids",), 20, [2, 16])
    expected, pull = m.vjp(**x, **masks)
    assert np.isnan(expected).any()
    x, masks = ({n: jnp.asarray(a) for n, a in of.items()} for of in (x, masks))
    attn = context_parallel(m, mesh_of(4), "cp", layout="contiguous")
    out, pull_divided = jax.vjp(jax.jit(lambda x: attn(**x, **masks)), x)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-10)
    weight = np.linspace(-1, 1, expected.size).reshape(expected.shape)
    (found,), true = pull_divided(jnp.asarray(weight)), pull(weight)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, true[name], rtol=1e-10, atol=1e-10, err_msg=name)


def test_sums_with_a_factor_for_each_number_are_scanned():
    check("ccq(gla)", "contiguous", 2, 5, h=4, n=4)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [(), ("lengths",)])
@pytest.mark.parametrize("expression", SCANNED)
def test_states_of_every_recurrence_are_scanned(expression, mask):
    check(expression, "contiguous", 4, 5, masks=mask, h=4, n=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("expression", ["elu1(linear)", "gla", "gated_delta"])
def test_states_in_other_precisions(expression, dtype):
    check(expression, "contiguous", 8, 5, dtype=dtype, h=4, n=4)


@pytest.mark.usefixtures("short_blocks")
def test_blocks_of_a_solve_are_given_to_all_with_padding():
    check("lucid_solve[beta=true]", "zigzag", 4, 6, masks=("lengths",))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "cyclic[block=3]"])
@pytest.mark.parametrize("mask", ["lengths", "key_mask", "segment_ids"])
@pytest.mark.usefixtures("short_blocks")
def test_solves_in_every_layout(layout, mask):
    check("lucid_solve[beta=true]", layout, 4, 6, masks=(mask,), kind="duplicate")


@pytest.mark.slow
@pytest.mark.parametrize(
    "expression",
    ["lucid[normalize=none]", "lucid[normalize=queries_and_keys,beta=true]", "lucid(laser)"],
)
def test_compositions_with_a_solve(expression):
    check(expression, "zigzag", 2, 6, masks=("lengths",))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_solves_in_other_precisions(dtype):
    check("lucid", "contiguous", 8, 3, dtype=dtype, kind="random")


@pytest.mark.slow
def test_a_solve_and_a_ring_in_float32_with_keys_that_coincide():
    check("lucid", "cyclic[block=2]", 2, 4, dtype="float32", kind="duplicate")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "cyclic[block=2]"])
@pytest.mark.parametrize("mask", [(), ("segment_ids", "key_mask"), ("lengths",)])
@pytest.mark.parametrize("expression", ["softmax", "laser", "differential"])
def test_rings_in_every_layout(expression, layout, mask):
    check(expression, layout, 4, 10, masks=mask, kind="duplicate")


def test_keys_of_path_are_gathered_with_padding():
    check("path", "zigzag", 4, 6, masks=("lengths", "key_mask"))


GATHERED = (
    *("path", "path[window=3]", "path[forget=unscaled]", "qk_norm(path)"),
    *("softmax[window=3]", "softmax[forget=unscaled]", "softmax[sink=true]"),
    *("softmax[distance=slopes]", "softmax[distance=buckets]"),
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "cyclic[block=2]"])
@pytest.mark.parametrize("mask", [(), ("segment_ids", "key_mask"), ("lengths",)])
@pytest.mark.parametrize("expression", GATHERED)
def test_keys_are_gathered_in_every_layout(expression, layout, mask):
    check(expression, layout, 4, 6, masks=mask, kind="duplicate")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_are_gathered_in_other_precisions(dtype):
    check("path", "contiguous", 8, 3, dtype=dtype, kind="random")


def test_gathered_keys_are_as_many_bytes_as_explained():
    m, x = problem("path", 20)
    attn = context_parallel(m, mesh_of(4), "cp", layout="contiguous")
    x = {name: jnp.asarray(a) for name, a in x.items()}
    own = [name for name, pattern in m.inputs.items() if "s" in pattern.letters]
    assert set(collectives(compiled(attn, 4, x))) == {"all-gather"}
    plan = attn.explain(**x)
    assert plan.bytes_sent == {f"{name} for out": 3 * x[name].nbytes // 4 for name in own}
    assert "the keys of all devices" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "cyclic[block=2]"])
def test_rings_without_causality(layout):
    packed = ("segment_ids",) if layout == "contiguous" else ()
    check("softmax[causal=false]", layout, 4, 6, masks=("key_mask", *packed))


def compiled(attn, devices, x):
    """The text of a call on sharded arrays."""
    sharding = NamedSharding(mesh_of(devices), P(None, "cp"))
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for name, a in x.items()}
    return jax.jit(lambda x: attn(**x)).lower(x).compile().as_text()


def collectives(text):
    """The number of collectives of each kind in a compiled program."""
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


def test_keys_go_to_the_next_device_only_and_as_many_bytes_as_explained():
    m, x = problem("softmax", 20)
    attn = context_parallel(m, mesh_of(4), "cp", layout="contiguous")
    x = {name: jnp.asarray(a) for name, a in x.items()}
    # k and v, once before the loop of P − 2 rounds and once in it.
    assert collectives(compiled(attn, 4, x)) == {"collective-permute": 4}
    plan = attn.explain(**x)
    sent = {f"{name} for out": 3 * x[name].nbytes // 4 for name in "kv"}
    assert plan.bytes_sent == sent
    assert "5 tokens on each of 4 devices" in str(plan)
    assert "the keys of two other devices at a time" in str(plan)


def test_states_are_sent_in_as_many_rounds_as_explained():
    m, x = problem("gated_delta", 20, h=4, n=4)
    attn = context_parallel(m, mesh_of(4), "cp", layout="contiguous")
    x = {name: jnp.asarray(a) for name, a in x.items()}
    # F in each of log₂ P rounds, T in all but the last, and S_begin.
    assert collectives(compiled(attn, 4, x)) == {"collective-permute": 4}
    (b, _, _, d), (_, _, n, e) = x["k"].shape, x["v"].shape
    sent = {"states for out": 3 * 8 * b * n * d * e, "transitions for out": 8 * b * n * d * d}
    assert attn.explain(**x).bytes_sent == sent


def test_a_solved_block_is_one_sum_and_as_many_bytes_as_explained():
    m, x = problem("lucid_solve", 8)
    attn = context_parallel(m, mesh_of(4), "cp", layout="contiguous")
    x = {name: jnp.asarray(a) for name, a in x.items()}
    assert collectives(compiled(attn, 4, x)) == {"all-reduce": 1}  # It is in the loop over blocks.
    # A sum over P devices sends 2 (P − 1) / P of what it adds up, here of all blocks.
    sent = {"k for out": 6 * x["k"].nbytes // 4, "y for out": 6 * x["v"].nbytes // 4}
    assert attn.explain(**x).bytes_sent == sent


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["softmax", "gla", "lucid"])
def test_gradients_in_a_shard_map_that_checks(expression):
    m, x = problem(expression, 8, h=4, n=4)
    x = {name: jnp.asarray(a) for name, a in x.items()}
    mesh, part = mesh_of(2), P(None, "cp")
    attn = context_parallel(m, mesh, "cp", layout="contiguous")
    mapped = jax.shard_map(
        lambda x: attn(**x), mesh=mesh, in_specs=(dict.fromkeys(x, part),), out_specs=part
    )
    gradients = jax.jit(jax.grad(lambda x: jnp.sin(mapped(x)).sum()))(x)
    expected = jax.grad(lambda x: jnp.sin(m(**x)).sum())(x)
    for name, gradient in gradients.items():
        assert jnp.allclose(gradient, expected[name], atol=1e-10), name


def test_in_a_users_shard_map_arrays_and_masks_are_parts():
    m, x = problem("lucid", 8, "duplicate")
    masks = masks_of(["lengths", "key_mask"], 8)
    attn, part = context_parallel(m, mesh_of(2), "cp", layout="contiguous"), P(None, "cp")

    @jax.jit
    def mapped(x, masks):
        specs = dict.fromkeys(x, part), {"lengths": P(), "key_mask": part}
        return jax.shard_map(
            lambda x, masks: attn(**x, **masks), mesh=mesh_of(2), in_specs=specs, out_specs=part
        )(x, masks)

    assert np.allclose(mapped(x, masks), m(**x, **masks), atol=1e-12)


@pytest.mark.slow
def test_arrays_whose_types_have_shardings():
    m, x = problem("softmax", 8, n=1)
    attn = context_parallel(m, mesh_of(2, AxisType.Explicit), "cp", layout="contiguous")
    out = jax.jit(attn)(**{name: jnp.asarray(a) for name, a in x.items()})
    assert out.sharding.spec[1] == "cp"
    assert np.allclose(out, m(**x), atol=1e-12)


@pytest.mark.slow
def test_another_axis_of_the_mesh_divides_sequences():
    m, x = problem("lucid", 8)
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    attn = context_parallel(m, mesh, "cp", layout="zigzag")
    sharding = NamedSharding(mesh, P("dp", "cp"))
    given = {n: jax.device_put(divided(a, "zigzag", 4), sharding) for n, a in x.items()}
    out = jax.jit(attn)(**given)
    assert tuple(out.sharding.spec)[:2] == ("dp", "cp")
    assert np.allclose(out, divided(m(**x), "zigzag", 4), atol=1e-12)


def test_a_segment_in_two_runs_is_an_error_or_nan_where_it_is_traced():
    attn = context_parallel("rms_norm", mesh_of(2), "cp", layout="zigzag")
    x = jnp.ones((2, 8, 1, 4))
    in_order = np.asarray([[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 0, 0, 2, 2]])
    ids = jnp.asarray(to_layout(in_order, "zigzag", 2))
    out = jax.jit(attn)(x, segment_ids=ids)
    assert bool(jnp.isfinite(out[0]).all())
    assert bool(jnp.isnan(out[1]).all())
    with pytest.raises(ValueError, match="segment_ids must be contiguous"):
        attn(x, segment_ids=ids)


@pytest.mark.parametrize(
    ("expression", "layout", "tokens", "masks", "words"),
    [
        ("softmax", "contiguous", 7, {}, "q has 7 tokens; .* a multiple of 4 on 4 devices"),
        ("softmax", "zigzag", 12, {}, "q has 12 tokens; .* a multiple of 8 on 4 devices"),
        ("softmax", "cyclic[block=3]", 16, {}, "q has 16 tokens; .* a multiple of 12 on 4"),
        ("softmax[bias=true]", "zigzag", 8, {}, "bias of softmax.* is of pairs"),
        ("softmax[causal=false,window=2]", "zigzag", 8, {}, "keys before a query, and .* causal"),
        (
            "softmax[causal=false,distance=slopes]",
            "contiguous",
            8,
            {},
            "keys before a query, and .* causal",
        ),
        ("gla", "zigzag", 8, {}, "tokens that are not consecutive, as gla needs them"),
        ("lucid(softmax[window=3])", "contiguous", 8, {}, "solves without a window"),
        ("lucid(path)", "contiguous", 8, {}, "solves of dot products"),
        ("deltaformer", "contiguous", 8, {}, "no way to divide the tokens of deltaformer"),
        ("unit_rows[axis=channel]", "zigzag", 8, {}, "tokens, and unit_rows.* computed of all"),
        (
            "softmax[causal=false]",
            "zigzag",
            8,
            {"segment_ids": np.zeros((2, 8), int)},
            "does not support segment_ids of softmax",
        ),
        ("softmax", "zigzag", 8, {"lengths": np.asarray([9, 1])}, "between 0 and s = 8"),
        ("softmax", "zigzag", 8, {"key_mask": np.ones((2, 7), bool)}, "key_mask is declared"),
    ],
)
def test_what_can_not_be_divided_is_named(expression, layout, tokens, masks, words):
    m, x = problem(expression, tokens)
    x = {name: jnp.asarray(a) for name, a in x.items()}
    attn = context_parallel(m, mesh_of(4), "cp", layout=layout)
    with pytest.raises(ValueError, match=words):
        attn(**x, **{name: jnp.asarray(mask) for name, mask in masks.items()})


def test_arrays_of_another_kind_are_named():
    m, x = problem("softmax", 8)
    attn = context_parallel(m, mesh_of(4), "cp", layout="contiguous")
    with pytest.raises(TypeError, match="q must be an array of JAX; found ndarray"):
        attn(**x)
    x = {name: jnp.asarray(a) for name, a in x.items()}
    with pytest.raises(TypeError, match="float32"):
        attn(**x | {"k": x["k"].astype("float32")})
    with pytest.raises(TypeError, match="cu_seqlens are not supported"):
        attn(**x, cu_seqlens=[0, 8])
    with pytest.raises(ValueError, match="as many queries as keys; found 4 and 8"):
        attn(**x | {"q": x["q"][:, :4]})
