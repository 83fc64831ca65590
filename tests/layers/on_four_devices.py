"""Flax on meshes of four devices: layers, decoders, training. `test_flax.py` runs this file."""

import contextlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from precondattn.layers.flax import Attention, Decoder, divide_tokens

orbax = pytest.importorskip("orbax.checkpoint")

KINDS = (AxisType.Auto, AxisType.Explicit)
AXES = ("dp", "cp", "tp")
RULES = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
LAYERS = ["linear", {"mechanism": "softmax", "kv_heads": 2}]  # Quick to compile.
ALONE = None
OPTIMIZER = optax.adamw(1e-2)


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


class TrainedDecoder(NamedTuple):
    """A decoder on a mesh of data, context and tensor parallelism, or on one device."""

    graph: nnx.GraphDef
    state: dict
    tokens: jax.Array
    following: jax.Array
    mesh: jax.sharding.Mesh | None

    def losses(self, steps):
        """The losses of some steps; the state after them is kept."""
        state, losses = self.state, []
        with contextlib.nullcontext() if self.mesh is ALONE else jax.set_mesh(self.mesh):
            for _ in range(steps):
                state, value = step(self.graph, state, self.tokens, self.following)
                losses.append(float(value))
        return losses, state


@partial(jax.jit, static_argnums=0)
def step(graph, state, tokens, following):
    def loss(weights):
        logits = nnx.merge(graph, weights)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, value


def trained(shape, seed=0):
    model = Decoder(12, 16, heads=4, layers=LAYERS, dtype=jnp.float64, rngs=nnx.Rngs(seed))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 12)
    if shape is ALONE:
        graph, weights = nnx.split(model)
        state = {"weights": weights, "moments": OPTIMIZER.init(weights)}
        state, tokens = jax.device_put((state, tokens), jax.devices()[0])  # As a restored state is.
        return TrainedDecoder(graph, state, tokens[:, :-1], tokens[:, 1:], ALONE)
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)
    divide_tokens(model, mesh, "cp")
    graph, weights = nnx.split(model)

    def placed(array, *names):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    def of_names(weight, spec):
        return placed(weight, *map(RULES.get, spec))

    weights = jax.tree.map(of_names, weights, nnx.get_partition_spec(weights))
    moments = OPTIMIZER.init(weights)
    moments = jax.tree.map(lambda x: x if x.ndim else placed(x), moments)
    of_tokens = (placed(x, "dp", "cp") for x in (tokens[:, :-1], tokens[:, 1:]))
    return TrainedDecoder(graph, {"weights": weights, "moments": moments}, *of_tokens, mesh)


def restored(path, shape):
    """A decoder with the state of another one, from other weights."""
    made = trained(shape, seed=1)

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    with orbax.StandardCheckpointer() as checkpointer:
        return made._replace(state=checkpointer.restore(path, jax.tree.map(like, made.state)))


def test_training_goes_on_on_another_mesh_as_on_one_device(tmp_path, double):
    expected, _ = trained(ALONE).losses(4)
    first, state = trained((1, 2, 2)).losses(2)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
    for shape in ((2, 2, 1), ALONE):
        second, _ = restored(tmp_path / "checkpoint", shape).losses(2)
        np.testing.assert_allclose(first + second, expected, rtol=1e-10)


@pytest.mark.parametrize("layout", ["heads", "contiguous"])
def test_masks_of_divided_tokens(layout, double):
    attn = Attention(16, heads=4, mechanism="softmax", dtype=jnp.float64, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    mask = jnp.arange(8) >= jnp.asarray([[2], [5]])
    call = nnx.jit(lambda attn, x, m: (attn(x, mask=m), attn(x, segment_ids=m.astype("int32"))))
    expected = call(attn, x, mask)
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    divide_tokens(attn, mesh, "cp", layout=layout)
    x, mask = jax.device_put((x, mask), NamedSharding(mesh, PartitionSpec("dp", "cp")))
    for y, wanted in zip(call(attn, x, mask), expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-10, atol=1e-10)


def test_what_divided_tokens_can_not_do_is_refused():
    mesh, explicit = (
        jax.make_mesh((4,), ("cp",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    attn = Attention(16, heads=4, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 6, 16), "float32")
    with pytest.raises(ValueError, match="axis 'cp' of the type Auto; found Explicit"):
        divide_tokens(attn, explicit, "cp")
    with pytest.raises(ValueError, match="model has no Attention; found Linear"):
        divide_tokens(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), mesh, "cp")
    with pytest.raises(ValueError, match="axis must be one of the mesh's, 'cp'; found 'tp'"):
        divide_tokens(attn, mesh, "tp")
    with pytest.raises(ValueError, match=r"'heads', 'contiguous', .*found 'zigzag'"):
        divide_tokens(attn, mesh, "cp", layout="zigzag")
    divide_tokens(attn, mesh, "cp")
    with pytest.raises(ValueError, match=r"q has 6 tokens; .*a multiple of 4"):
        attn(x)
    with pytest.raises(ValueError, match="whose tokens are divided supports no cache"):
        attn(x, cache=attn.init_cache(1, 8))
    with pytest.raises(ValueError, match="whose tokens are divided supports no cu_seqlens"):
        attn(x, cu_seqlens=jnp.asarray([0, 6]))


def assert_the_same_on_a_mesh(module, x, kind):
    """Output and gradients, with sharded weights and batches, which are returned."""
    graph, state = nnx.split(module)

    @jax.jit
    def run(state, x):
        def loss(state):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(y**2), y

        return jax.grad(loss, has_aux=True)(state)

    expected, y = run(state, x)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)

    def placed(array, spec):
        axes = PartitionSpec(*(RULES.get(name) for name in spec))
        return jax.device_put(array, NamedSharding(mesh, axes))

    with jax.set_mesh(mesh):
        state = jax.tree.map(placed, state, nnx.get_partition_spec(state))
        rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
        gradients, sharded = run(state, rows)
        assert "dp" in sharded.sharding.spec
        np.testing.assert_allclose(sharded, y, rtol=1e-5, atol=1e-5)
        for found, wanted in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
            size = float(np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, atol=1e-5 * size + 1e-6)
    return gradients, sharded


def shapes_of_shards(weight):
    return {shard.data.shape for shard in weight[...].addressable_shards}


def test_a_sharded_layer_gives_the_same_output_and_gradients():
    attn = Attention(32, heads=4, mechanism="gated_delta", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 6, 32), "float32")
    gradients, _ = assert_the_same_on_a_mesh(attn, x, AxisType.Explicit)
    assert shapes_of_shards(gradients["q_proj"]["kernel"]) == {(32, 16)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_decoder_gives_the_same_logits_and_gradients(kind):
    model = Decoder(50, 32, heads=4, layers=LAYERS, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    gradients, logits = assert_the_same_on_a_mesh(model, tokens, kind)
    assert logits.sharding.spec[2] == "tp"
    assert shapes_of_shards(gradients["embedding"]) == {(25, 32)}
    assert shapes_of_shards(gradients["blocks"][0]["mlp"]["down_proj"]["kernel"]) == {(44, 32)}
