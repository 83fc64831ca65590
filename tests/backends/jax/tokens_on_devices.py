"""`context_parallel` in JAX, on 2, 4 and 8 devices: tokens that are divided or exchanged for heads.

`test_backend.py` runs these tests in a process of its own.
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
    return x if axis is None or layout == "heads" else to_layout(x, layout, devices, axis)


def require_near(found, expected, what, tolerance):
    found = np.asarray(found, dtype=np.float64)
    assert np.all(np.isfinite(found)), what
    error = abs(found - expected).max() / max(1.0, abs(expected).max())
    assert error < tolerance, f"{what}: {error:.2e}"


FOUR = {"h": 4, "n": 4}
PADDED, PACKED, KEYS = ("lengths",), ("segment_ids",), ("key_mask",)
LAYOUTS = ("contiguous", "zigzag", "cyclic[block=2]")
SOLVE = "lucid_solve[beta=true]"
RINGS = ("softmax", "laser", "differential")
GATHERED = (
    *("path", "path[window=3]", "path[forget=unscaled]", "qk_norm(path)"),
    *("softmax[window=3]", "softmax[forget=unscaled]", "softmax[sink=true]"),
    *("softmax[distance=slopes]", "softmax[distance=buckets]"),
)


def case(expression, layout, devices, each, *masks, **options):
    name = "-".join(map(str, (expression, layout, devices, *masks, *options.values())))
    return pytest.param(expression, layout, devices, each, masks, options, id=name)


CASES = (
    # Keys go around a ring.
    case("softmax[softcap=5,scale=0.3]", "zigzag", 8, 6, *PADDED, *KEYS, dtype="float32"),
    case("softmax", "cyclic[block=3]", 2, 6, *PACKED),
    case("laser", "contiguous", 2, 5),
    # Weights of pieces before a ring get their gradient.
    case("temperature[per=head](softmax[causal=false])", "contiguous", 2, 5, n=4),
    case("softmax", "contiguous", 2, 5, dtype="bfloat16", kind="random"),
    # States are scanned and multiplied by transitions, or by a factor for each number.
    case("gated_delta", "contiguous", 4, 5, *PADDED, *PACKED, *KEYS, bounds=[5, 18], **FOUR),
    case("ccq(gla)", "contiguous", 2, 5, **FOUR),
    # Each device has all tokens of some heads.
    *(
        case(name, "heads", 4, 2, h=8, n=n)
        for name, n in (
            ("softmax[bias=true]", 8),
            ("softmax[causal=false,distance=buckets]", 2),
            ("laser", 1),
            ("temperature[per=head](linear)", 8),
            ("mesa", 8),
        )
    ),
    case("lucid", "heads", 4, 2, *PADDED, *KEYS, *PACKED, h=8, n=2, axes=AxisType.Explicit),
    # Blocks of a solve are given to all, and keys of PaTH are gathered.
    case(SOLVE, "zigzag", 4, 6, *PADDED, short=True),
    case("path", "zigzag", 4, 6, *PADDED, *KEYS),
)
SLOW = (
    *(case(name, "heads", 4, 2, h=8, n=n) for name, n in (("softmax", 2), ("ccq(gla)", 8))),
    *(
        case(name, "contiguous", 4, 5, *masks, bounds=[5, 12], **FOUR)
        for name, masks in (("ccq(gla)", (*PACKED, *PADDED)), ("mesa(ssd)", (*PACKED, *KEYS)))
    ),
    *(case(name, "contiguous", 4, 5, *PADDED, **FOUR) for name in SCANNED),
    case("gated_delta", "contiguous", 8, 5, dtype="bfloat16", **FOUR),
    *(
        case(name, layout, 4, 10 if name in RINGS else 6, *masks, kind="duplicate")
        for name in (*RINGS, *GATHERED, "lucid(laser)", "softmax[causal=false]")
        for layout, masks in zip(LAYOUTS, ((), (*PACKED, *KEYS), PADDED), strict=True)
        if masks != (*PACKED, *KEYS) or name != "softmax[causal=false]"
    ),
)


@pytest.mark.parametrize(
    ("expression", "layout", "devices", "each", "masks", "options"),
    [*CASES, *(pytest.param(*of.values, id=of.id, marks=pytest.mark.slow) for of in SLOW)],
)
def test_output_and_gradients_are_those_of_one_device(
    expression, layout, devices, each, masks, options, monkeypatch
):
    """Output and gradients, of tokens that are divided, are those of NumPy on all of them."""
    tokens = devices * each
    options = {"dtype": "float64", "kind": "clustered", "bounds": None} | options
    dtype, kind, bounds = (options.pop(name) for name in ("dtype", "kind", "bounds"))
    axes = options.pop("axes", AxisType.Auto)
    if options.pop("short", False):  # Several blocks of a solve, and a shorter last one.
        monkeypatch.setattr(solve, "BLOCK", 2)
    m, x = problem(expression, tokens, kind, **options)
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
    attn = context_parallel(m, mesh_of(devices, axes), "cp", layout=layout)
    d_out = jnp.asarray(divided(weight, layout, devices))

    @jax.jit
    def value(x):
        out = attn(**x, **of_tokens)
        return (out * d_out).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, has_aux=True))(given)
    assert out.dtype == dtype
    assert out.sharding.spec[1] == "cp"
    require_near(out, divided(expected, layout, devices), "the output", WITHIN[dtype])
    for name, gradient in gradients.items():
        true = divided(of_one[name], layout, devices, times[name])
        require_near(gradient, true, f"the gradient of {name}", WITHIN[dtype])


def test_half_precision_is_float32_between_pieces_that_send_no_values():
    m, x = problem("qk_norm(linear)", 10, h=4, n=4)
    x = {name: jnp.asarray(a, "bfloat16") for name, a in x.items()}
    attn = jax.jit(context_parallel(m, mesh_of(2), "cp", layout="contiguous").__call__)
    exact = attn(**{name: a.astype("float32") for name, a in x.items()})
    once = exact.astype("bfloat16")
    found = attn(**x)
    assert found.dtype == "bfloat16"
    assert np.array_equal(found, once)  # The result is rounded once, at the end.


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


COLLECTIVES = {
    "path": {"all-gather": ...},
    # k and v, once before the loop of P − 2 rounds and once in it.
    "softmax": {"collective-permute": 4},
    # F in each of log₂ P rounds, T in all but the last, and S_begin.
    "gated_delta": {"collective-permute": 4},
    # The sum is in the loop over blocks.
    "lucid_solve": {"all-reduce": 1},
}
"""The collectives of a compiled program."""


@pytest.mark.parametrize("expression", COLLECTIVES)
def test_no_more_is_sent_than_needed(expression):
    m, x = problem(expression, 20, **(FOUR if expression == "gated_delta" else {}))
    x = {name: jnp.asarray(a) for name, a in x.items()}
    found = collectives(compiled(context_parallel(m, mesh_of(4), "cp", layout="contiguous"), 4, x))
    expected = COLLECTIVES[expression].items()
    assert found == {kind: found.get(kind) if n is ... else n for kind, n in expected}


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
        ("lucid", "heads", 7, {}, "q has 7 tokens; .* a multiple of 4 on 4 devices"),
        ("lucid h=6", "heads", 8, {}, "divide the number of heads of the output; found h=6"),
        ("lucid h=12", "heads", 8, {}, "or are a multiple; found n=6"),
        ("retention", "heads", 8, {}, "depends on its number"),
        ("softmax", "contiguous", 7, {}, "q has 7 tokens; .* a multiple of 4 on 4 devices"),
        ("softmax", "cyclic[block=3]", 16, {}, "q has 16 tokens; .* a multiple of 12 on 4"),
        ("softmax[bias=true]", "zigzag", 8, {}, "bias of softmax.* is of pairs"),
        ("softmax[causal=false,window=2]", "zigzag", 8, {}, "keys before a query, and .* causal"),
        ("gla", "zigzag", 8, {}, "tokens that are not consecutive, as gla needs them"),
        ("lucid(softmax[window=3])", "contiguous", 8, {}, "solves without a window"),
        ("lucid(path)", "contiguous", 8, {}, "solves of dot products"),
        ("deltaformer", "contiguous", 8, {}, "no way to divide the tokens of deltaformer"),
        ("unit_rows[axis=channel]", "zigzag", 8, {}, "tokens, and unit_rows.* computed of all"),
        ("softmax", "zigzag", 8, {"lengths": np.asarray([9, 1])}, "between 0 and s = 8"),
        ("softmax", "zigzag", 8, {"key_mask": np.ones((2, 7), bool)}, "key_mask is declared"),
        ("softmax", "zigzag", 8, {"cu_seqlens": np.asarray([0, 8])}, "cu_seqlens are not support"),
        ("lucid", "ring", 8, {}, r"'zigzag' or 'cyclic\[block=512\]'; found 'ring'"),
    ],
)
def test_what_can_not_be_divided_is_named(expression, layout, tokens, masks, words):
    expression, _, heads = expression.partition(" h=")
    m, x = problem(expression, tokens, h=int(heads or 8), n=6 if heads else 8)
    x = {name: jnp.asarray(a) for name, a in x.items()}

    def call():
        attn = context_parallel(m, mesh_of(4), "cp", layout=layout)
        attn(**x, **{name: jnp.asarray(mask) for name, mask in masks.items()})

    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_tokens_are_exchanged_for_heads_and_nothing_else():
    m, x = problem("lucid", 8, h=8, n=8)
    text = compiled(context_parallel(m, mesh_of(4), "cp"), 4, x)
    assert collectives(text) == {"all-to-all": 4}  # q, k, v and out


@pytest.mark.parametrize(
    ("expression", "h", "layout"),
    [("lucid", 4, "heads"), ("lucid", 6, "contiguous"), ("retention", 4, "contiguous")],
)
def test_a_layout_is_chosen_by_default(expression, h, layout):
    m, x = problem(expression, 8, h=h, n=h)
    x = {n: jnp.asarray(a) for n, a in x.items()}
    found = collectives(compiled(context_parallel(m, mesh_of(4), "cp"), 4, x))
    assert ("all-to-all" in found) == (layout == "heads")


def test_an_axis_that_the_mesh_has_not_and_the_reasons_of_both_layouts():
    with pytest.raises(ValueError, match="axis must be one of the mesh's, 'cp'; found 'sp'"):
        context_parallel("lucid", mesh_of(4), "sp")
    m, x = problem("deltaformer", 8, h=6, n=6)
    x = {n: jnp.asarray(a) for n, a in x.items()}
    with pytest.raises(ValueError, match=r"layout 'heads' .*; layout 'contiguous' has no way"):
        context_parallel(m, mesh_of(4), "cp")(**x)
