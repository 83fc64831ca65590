"""One exported program serves all lengths, in another process too."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

LENGTHS = (3, 150)
"""Less than a block of 128 tokens, and more."""


def arrays_of(m, tokens):
    layout = CallLayout("exported", b=3, t=tokens, s=tokens, h=2, n=1, d=4, e=4)
    made = make_inputs(m, layout, "random")
    return {name: jnp.asarray(array, dtype=jnp.float32) for name, array in made.items()}


def of_any_size(arrays):
    """The inputs' shapes, with symbols for the batch and the number of tokens."""
    b, t = export.symbolic_shape("b, t")

    def shape(array):
        sizes = tuple({3: b, 7: t}.get(n, n) if i < 2 else n for i, n in enumerate(array.shape))
        return jax.ShapeDtypeStruct(sizes, array.dtype)

    return jax.tree.map(shape, arrays)


def value_and_gradient(m, x):
    def loss(x):
        out = m(**x)
        return jnp.sum(out**2), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(x)
    return {"out": out} | gradient


def exported_gradient(m):
    x = of_any_size(arrays_of(m, 7))
    return export.export(jax.jit(lambda x: value_and_gradient(m, x)))(x)


def exported_extension(m):
    """The program extends a cache with room for the longest sequence."""
    x = arrays_of(m, 7)
    cache = m.init_cache(**x, capacity=max(LENGTHS))
    extend = jax.jit(lambda cache, x: m.extend(cache, **x))
    return export.export(extend)(*of_any_size((cache, x)))


def close(result, expected):
    scale = max(float(np.max(np.abs(expected))), 1.0)
    np.testing.assert_allclose(result / scale, expected / scale, rtol=0, atol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["lucid", "mlstm"])
def test_one_program_has_output_and_gradient_of_all_lengths(expression):
    m = pa.parse(expression)
    program = exported_gradient(m)
    for tokens in LENGTHS:
        x = arrays_of(m, tokens)
        result, expected = program.call(x), value_and_gradient(m, x)
        for name, array in expected.items():
            close(result[name], array)


@pytest.mark.thorough
def test_one_program_extends_a_cache_by_any_number_of_tokens():
    m = pa.Lucid()
    program, x = exported_extension(m), arrays_of(m, max(LENGTHS))
    cache, outs = m.init_cache(**x, capacity=max(LENGTHS)), []
    for part in (slice(0, 146), slice(146, 149), slice(149, 150)):
        out, cache = program.call(cache, {name: a[:, part] for name, a in x.items()})
        outs.append(out)
    close(jnp.concatenate(outs, axis=1), m(**x))


IN_ANOTHER_PROCESS = """
import sys, numpy as np, jax
from jax import export
import precondattn as pa

folder = sys.argv[1]
export.register_namedtuple_serialization(pa.Cache, serialized_name="precondattn.Cache")

def program(name):
    return export.deserialize(bytearray(open(f"{folder}/{name}", "rb").read()))

x = {name: jax.numpy.asarray(array) for name, array in np.load(f"{folder}/given.npz").items()}
out = program("gradient").call(x)
cache = pa.GatedDelta().init_cache(**x)
extended, cache = program("extension").call(cache, x)
np.savez(f"{folder}/found.npz", extended=extended, length=cache.length, **out)
"""


@pytest.mark.thorough
def test_a_serialised_program_runs_in_another_process(tmp_path):
    pytest.importorskip("flatbuffers", reason="JAX serialises by it")
    m = pa.GatedDelta()
    export.register_namedtuple_serialization(pa.Cache, serialized_name="precondattn.Cache")
    (tmp_path / "gradient").write_bytes(exported_gradient(m).serialize())
    (tmp_path / "extension").write_bytes(exported_extension(m).serialize())
    x = arrays_of(m, 5)
    np.savez(tmp_path / "given.npz", **x)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(tmp_path / "found.npz") as found:
        for name, array in value_and_gradient(m, x).items():
            close(found[name], array)
        close(found["extended"], m(**x))
        assert found["length"].tolist() == [5, 5, 5]
