"""Layers of Flax, sharded over four devices; `test_flax_attention.py` runs this file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from precondattn.layers.flax import Attention

RULES = {"heads": "model", "kv_heads": "model"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mechanism", ["softmax", "gated_delta"])
def test_a_sharded_layer_gives_the_same_output_and_gradients(mechanism, kind):
    attn = Attention(32, heads=4, mechanism=mechanism, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 6, 32), "float32")
    graph, state = nnx.split(attn)

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
        weight = gradients["inputs"]["q"]["weight"][...]
        assert {s.data.shape for s in weight.addressable_shards} == {(32, 2, 8)}
        np.testing.assert_allclose(sharded, y, rtol=1e-5, atol=1e-5)
        for found, wanted in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
            size = float(np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, atol=1e-5 * size + 1e-6)
