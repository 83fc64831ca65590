"""Advice of refusals with DTensors, and of `context_parallel`: what it says to do works.

One device is enough: a layout and a placement are refused for any number of devices.
"""

import re

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.algebra import registry
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUTS = (None, "heads", "contiguous", "zigzag", "cyclic[block=1]")
OURS = [m for m in registry.registered().values() if m.__module__.startswith("precondattn.")]
EXPRESSIONS = sorted({text for mechanism in OURS for text in mechanism.variants})


@pytest.fixture(scope="module")
def mesh():
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    torch.distributed.destroy_process_group()


def inputs_of(mechanism):
    """The inputs of a mechanism with four heads, and two sequences of four tokens."""
    layout = CallLayout("test", t=4, s=4, h=4, n=4)
    return make_inputs(mechanism, layout, "random")


def advised_in(refusal):
    return re.findall(r"'(\w+)'", refusal.partition("; use the layout ")[2])


def require_right_advice(refusal_in):
    """`refusal_in(layout)`; the number of layouts that were advised."""
    advised = {other for layout in LAYOUTS for other in advised_in(refusal_in(layout) or "")}
    assert not [layout for layout in advised if refusal_in(layout) is not None]
    if any(refusal_in(layout) for layout in LAYOUTS) and not advised:
        assert all(refusal_in(layout) for layout in ("heads", "contiguous"))
    return len(advised)


def require_right_advice_everywhere(asarray, divided, every_masks=({},)):
    """`divided(m, layout)` is a divided call; what it advises for each expression works."""
    advised = 0
    for m in map(pa.parse, EXPRESSIONS):
        if m.mixes_sequences or "grid" in str(m):
            continue
        x = {n: asarray(a) for n, a in inputs_of(m).items()}
        for masks in every_masks:
            advised += require_right_advice(
                lambda layout, m=m, given={**x, **masks}: divided(m, layout).refusal(**given)
            )
    assert advised > 20


@pytest.mark.thorough
def test_the_layouts_that_jax_advises_divide_the_call():
    jax = pytest.importorskip("jax")
    from precondattn.parallel.jax import context_parallel

    mesh = jax.sharding.AbstractMesh((2,), ("cp",))
    packed = {"segment_ids": jax.numpy.zeros((2, 4), int)}

    def divided(m, layout):
        return context_parallel(m, mesh, "cp", layout=layout)

    require_right_advice_everywhere(jax.numpy.asarray, divided, ({}, packed))
    m = pa.parse("row_normalized[axis=channel](softmax[causal=false])")
    x = {n: jax.numpy.asarray(a) for n, a in inputs_of(m).items()}
    assert advised_in(divided(m, "zigzag").refusal(**x, **packed)) == ["heads"]


def test_the_layouts_that_pytorch_advises_divide_the_call(mesh):
    from precondattn.parallel.torch import context_parallel

    require_right_advice_everywhere(
        torch.tensor, lambda m, layout: context_parallel(m, mesh, layout=layout)
    )


def test_a_prefill_is_advised_a_layout_that_has_a_cache(mesh):
    from precondattn.parallel.torch import context_parallel

    for text, advised in (
        ("gla", ["contiguous"]),
        ("deltaformer", []),
        ("qk_norm(gla)", ["contiguous"]),
    ):
        m = pa.parse(text)
        x = {n: torch.tensor(a) for n, a in inputs_of(m).items()}
        with pytest.raises(ValueError, match="layout 'zigzag'") as raised:
            context_parallel(m, mesh, layout="zigzag").prefill(**x, capacity=4)
        assert advised_in(str(raised.value)) == advised
        for layout in advised:
            out, _ = context_parallel(m, mesh, layout=layout).prefill(**x, capacity=4)
            torch.testing.assert_close(out, m(**x))


def sharded(mesh, axis):
    from torch.distributed.tensor import DTensor, Shard

    tensors = torch.randn(3, 2, 4, 4, 4, dtype=torch.float64)
    return [DTensor.from_local(x, mesh, [Shard(axis)], run_check=False) for x in tensors]


def test_what_is_advised_for_dtensors_works(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    from precondattn.parallel.torch import context_parallel

    m, of_time = pa.Lucid(), sharded(mesh, 1)
    plain = [x.to_local() for x in of_time]
    expected = m(*plain)
    advice = "redistribute it first, or use precondattn.parallel.torch.context_parallel"
    with pytest.raises(ValueError, match=advice):
        m(*of_time)
    redistributed = [x.redistribute(mesh, [Shard(0)]) for x in of_time]
    torch.testing.assert_close(m(*redistributed).to_local(), expected)
    torch.testing.assert_close(context_parallel(m, mesh)(*of_time).to_local(), expected)

    with pytest.raises(ValueError, match=r"redistribute it first$"):
        m(*sharded(mesh, 3))
    with pytest.raises(TypeError, match="`distribute_tensor` makes one"):
        m(redistributed[0], *plain[1:])
    made = [distribute_tensor(x, mesh, [Shard(0)]) for x in plain]
    torch.testing.assert_close(m(*made).to_local(), expected)

    ids = torch.tensor([[0, 0, 1, 1]] * 2)
    with pytest.raises(ValueError, match=r"cu_seqlens .* \(use segment_ids\)"):
        m(*made, cu_seqlens=torch.tensor([0, 2, 4]))
    out = m(*made, segment_ids=distribute_tensor(ids, mesh, [Shard(0)]))
    torch.testing.assert_close(out.to_local(), m(*plain, segment_ids=ids))

    with pytest.raises(ValueError, match=r"heads can not be sharded: .*; shard the batch"):
        pa.retention(*sharded(mesh, 2))
    torch.testing.assert_close(pa.retention(*made).to_local(), pa.retention(*plain))


@pytest.mark.thorough
def test_jax_advises_segment_ids_and_padding_that_work():
    jax = pytest.importorskip("jax")
    from precondattn.parallel.jax import context_parallel

    m, jnp = pa.Softmax(), jax.numpy
    x = [jnp.asarray(inputs_of(m)[name]) for name in "qkv"]
    attn = context_parallel(m, jax.make_mesh((1,), ("cp",)), "cp", layout="zigzag")
    with pytest.raises(TypeError, match="cu_seqlens are not supported; give segment_ids"):
        attn(*x, cu_seqlens=[0, 2, 4])
    ids = jnp.asarray([[0, 0, 1, 1]] * 2)
    assert jnp.allclose(attn(*x, segment_ids=ids), m(*x, segment_ids=ids), atol=1e-5)
    odd = [a[:, :3] for a in x]
    with pytest.raises(ValueError, match=r"a multiple of 2 .* \(pad them, and give lengths\)"):
        attn(*odd)
    padded = [jnp.pad(a, ((0, 0), (0, 1), (0, 0), (0, 0))) for a in odd]
    out = attn(*padded, lengths=jnp.asarray([3, 3]))[:, :3]
    assert jnp.allclose(out, m(*odd), atol=1e-5)
