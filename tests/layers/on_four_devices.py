"""Layers and decoders of Flax on four devices; `test_flax_attention.py` runs this file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from precondattn.layers.flax import Attention, Decoder

RULES = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}
KINDS = (AxisType.Auto, AxisType.Explicit)


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
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)

    def placed(array, spec):
        axes = PartitionSpec(*(RULES.get(name) for name in spec))
        return jax.device_put(array, NamedSharding(mesh, axes))

    with jax.set_mesh(mesh):
        state = jax.tree.map(placed, state, nnx.get_partition_spec(state))
        rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        gradients, sharded = run(state, rows)
        assert "data" in sharded.sharding.spec
        np.testing.assert_allclose(sharded, y, rtol=1e-5, atol=1e-5)
        for found, wanted in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
            size = float(np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, atol=1e-5 * size + 1e-6)
    return gradients, sharded


def shapes_of_shards(weight):
    return {shard.data.shape for shard in weight[...].addressable_shards}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mechanism", ["softmax", "gated_delta"])
def test_a_sharded_layer_gives_the_same_output_and_gradients(mechanism, kind):
    attn = Attention(32, heads=4, mechanism=mechanism, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 6, 32), "float32")
    gradients, _ = assert_the_same_on_a_mesh(attn, x, kind)
    assert shapes_of_shards(gradients["q_proj"]["kernel"]) == {(32, 16)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_decoder_gives_the_same_logits_and_gradients(kind):
    layers = ["linear", {"mechanism": "softmax", "kv_heads": 2}]  # Quick to compile.
    model = Decoder(50, 32, heads=4, layers=layers, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    gradients, logits = assert_the_same_on_a_mesh(model, tokens, kind)
    assert logits.sharding.spec[2] == "model"
    assert shapes_of_shards(gradients["embedding"]) == {(25, 32)}
    assert shapes_of_shards(gradients["blocks"][0]["mlp"]["down_proj"]["kernel"]) == {(44, 32)}
