"""Masks of pairs beside PyTorch's own attention functions, and where calls are divided."""

import warnings

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import precondattn as pa

B, T, H, N, D = 2, 150, 4, 2, 8
AT = torch.arange(T)
CAUSAL = AT[:, None] >= AT
PREFIX = torch.tensor([7, 100])
SEGMENTS = torch.stack([AT // 50, (AT >= 90) + 0])


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, D), (B, T, N, D), (B, T, N, D))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def agrees(ours, theirs, qkv):
    """The output (b, t, h, e) and the gradients of both."""
    expected = theirs(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)
    found = ours(*qkv)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = [torch.autograd.grad(out, qkv, cotangent) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)
    return found


@pytest.mark.parametrize("heads", [1, H])
def test_an_attn_mask_is_that_of_scaled_dot_product_attention(heads, qkv):
    mask = torch.rand(B, heads, T, T, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[0, 0, 5] = mask[1, 0, 90:] = False  # Rows that may attend to nothing.
    out = agrees(
        lambda q, k, v: pa.softmax(q, k, v, attn_mask=mask),
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=mask & CAUSAL, enable_gqa=True
        ),
        qkv,
    )
    assert not out[0, 5, 0].any()
    assert not out[1, 90:, 0].any()


def by_flex_attention(mask_mod, qkv):
    """Its output (b, t, h, e); on a CPU it has no gradient."""
    block_mask = create_block_mask(mask_mod, B, None, T, T, device="cpu")
    q, k, v = (x.detach().transpose(1, 2) for x in qkv)
    with warnings.catch_warnings():  # It is slow without a compiler, and says so.
        warnings.simplefilter("ignore")
        out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    return out.transpose(1, 2)


def test_a_prefix_is_the_mask_of_flex_attentions_prefix_language_model(qkv):
    def prefix_lm(b, h, q, kv):
        return (q >= kv) | (kv < PREFIX[b])

    expected = by_flex_attention(prefix_lm, qkv)
    torch.testing.assert_close(pa.softmax(*qkv, prefix=PREFIX), expected, rtol=0, atol=1e-12)


def test_a_prefix_with_a_window_and_segments_is_that_of_flex_attention(qkv):
    start = torch.stack([AT // 50 * 50, torch.where(AT >= 90, 90, 0)])

    def mask_mod(b, h, q, kv):
        is_near = (q >= kv) & (q - kv < 9)
        return (is_near | (kv < start[b, q] + PREFIX[b])) & (SEGMENTS[b, q] == SEGMENTS[b, kv])

    found = pa.Softmax(window=9)(*qkv, prefix=PREFIX, segment_ids=SEGMENTS)
    expected = by_flex_attention(mask_mod, qkv)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("library", ["reference", "portable", "torch", "jax"])
@pytest.mark.parametrize("expression", ["softmax", "laser", "softmax[window=9]", "differential"])
def test_rows_that_see_nothing_are_zero_with_finite_gradients(expression, library):
    array = {"torch": torch.from_numpy}.get(library, np.asarray)
    if library == "jax":
        array = pytest.importorskip("jax.numpy").asarray
    m, rng = pa.parse(expression), np.random.default_rng(0)
    sizes = {"b": 2, "t": 20, "s": 20, "h": 2, "n": 2, "d": 4, "e": 4}
    x = {n: array(rng.normal(size=p.shape(sizes))) for n, p in m.inputs.items()}
    mask = np.ones((2, 1, 20, 20), dtype=bool)
    mask[0, :, 3:6] = mask[1] = False  # Three rows of one sequence, and all of the other.
    out, pull = m.vjp(**x, attn_mask=array(mask), backend=library)
    out = np.asarray(out)
    assert not out[0, 3:6].any()
    assert not out[1].any()
    assert out[0, 6:].all()
    gradients = {n: np.asarray(g) for n, g in pull(array(np.ones_like(out))).items()}
    assert all(np.isfinite(g).all() for g in gradients.values())
    assert not gradients["v"][1].any()


BAD = {
    "an additive mask": (torch.zeros(1, 1, 4, 4), TypeError, "dtype bool; found float32"),
    "integers": (torch.ones(1, 1, 4, 4, dtype=int), TypeError, "dtype bool; found int64"),
    "two axes": (CAUSAL[:4, :4], ValueError, r"\(2 or 1, 2 or 1, 4, 4\); found \(4, 4\)"),
    "three axes": (torch.ones(2, 4, 4) > 0, ValueError, r"found \(2, 4, 4\)"),
    "no axis": (torch.tensor(True), ValueError, r"found \(\)"),
    "other sequences": (torch.ones(3, 1, 4, 4) > 0, ValueError, r"found \(3, 1, 4, 4\)"),
    "key heads": (torch.ones(2, 3, 4, 4) > 0, ValueError, r"found \(2, 3, 4, 4\)"),
    "a row of keys": (torch.ones(2, 1, 1, 4) > 0, ValueError, r"found \(2, 1, 1, 4\)"),
    "another library": (np.ones((1, 1, 4, 4), bool), TypeError, "array of torch, as the inputs"),
    "a list": ([[[[True]]]], TypeError, "array of torch, as the inputs; found list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_attn_mask_is_named_with_what_is_expected_and_found(name):
    mask, error, match = BAD[name]
    q, m = torch.ones(2, 4, 2, 4), pa.Softmax()
    cache = m.init_cache(q, q, q, capacity=4)
    for call in (m, m.vjp, lambda *x, **masks: m.extend(cache, *x, **masks)):
        with pytest.raises(error, match=f"softmax: attn_mask .*{match}"):
            call(q, q, q, attn_mask=mask)


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


DIVIDED = {"prefix": torch.tensor([1]), "attn_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}


@pytest.mark.parametrize("name", DIVIDED)
def test_calls_of_several_processes_refuse_masks_of_pairs(name, mesh):
    from torch.distributed.tensor import DTensor, Replicate

    from precondattn.layers.torch import Attention, divide_tokens
    from precondattn.parallel.torch import context_parallel

    given, q, m = {name: DIVIDED[name]}, torch.ones(1, 4, 2, 4), pa.Softmax()
    message = f"softmax: {name} is for calls on one device, which are not divided"
    shared = DTensor.from_local(q, mesh, [Replicate()])
    cache = m.init_cache(shared, shared, shared, capacity=4)
    of_processes = context_parallel(m, mesh)
    for call in (
        lambda: m(shared, shared, shared, **given),
        lambda: m.vjp(shared, shared, shared, **given),
        lambda: m.extend(cache, shared, shared, shared, **given),
        lambda: of_processes(q, q, q, **given),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(TypeError, match=message):
        of_processes.prefill(q, q, q, capacity=8, **given)
    _, divided = of_processes.prefill(q, q, q, capacity=8)
    with pytest.raises(TypeError, match=message):
        of_processes.extend(divided, q, q, q, **given)
    layer = Attention(8, heads=2)
    divide_tokens(layer, mesh)
    with pytest.raises(ValueError, match=f"a layer whose tokens are divided supports no {name}"):
        layer(torch.ones(1, 4, 8), **given)


@pytest.mark.parametrize("name", DIVIDED)
def test_calls_of_a_mesh_of_jax_refuse_masks_of_pairs(name):
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")
    from jax.sharding import AxisType

    from precondattn.layers.flax import Attention, divide_tokens
    from precondattn.parallel.jax import context_parallel

    mesh = jax.make_mesh((1,), ("cp",), axis_types=(AxisType.Auto,))
    given, q = {name: jax.numpy.asarray(DIVIDED[name].numpy())}, jax.numpy.ones((1, 4, 2, 4))
    message = f"{name} is for calls on one device, which are not divided"
    with pytest.raises(TypeError, match=message):
        context_parallel("softmax", mesh, "cp")(q, q, q, **given)
    layer = Attention(8, heads=2, rngs=nnx.Rngs(0))
    divide_tokens(layer, mesh, "cp")
    with pytest.raises(ValueError, match=f"tokens are divided supports no {name}"):
        layer(jax.numpy.ones((1, 4, 8)), **given)
