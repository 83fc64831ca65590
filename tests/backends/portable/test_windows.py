"""Windows whose values are far apart, and compiled for any number of tokens."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close


def problem(expression, tokens, fewer=0):
    m, rng = pa.parse(expression), np.random.default_rng(tokens)
    sizes = {"b": 2, "t": tokens - fewer, "s": tokens, "h": 4, "n": 2, "d": 6, "e": 3}
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in m.inputs.items()}
    return m, x, rng.normal(size=(2, tokens - fewer, 4, 3))


@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize(
    ("expression", "tokens", "fewer"),
    [("windowed[size=4,shift=2]", 23, 0), ("windowed[size=2/3,shift=1/2,grid=5,bias=true]", 25, 4)],
)
def test_slots_without_a_query_do_not_overflow_where_values_are_far_apart(
    expression, tokens, fewer, library
):
    m, x, cotangent = problem(f"laser({expression})", tokens, fewer)
    x["v"] = x["v"] + 2000.0 * (tokens - np.arange(tokens))[:, None, None]
    expected = m.vjp(**x, backend="reference")[1](cotangent)
    if library == "jax":
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True):
            x = {name: jax.numpy.asarray(array) for name, array in x.items()}
            gradients = m.vjp(**x, backend="jax")[1](jax.numpy.asarray(cotangent))
    else:
        gradients = m.vjp(**x, backend="portable")[1](cotangent)
    for name, gradient in expected.items():
        assert_close(np.asarray(gradients[name]), gradient)


def test_a_compiled_call_takes_any_number_of_rows_of_the_grid():
    torch = pytest.importorskip("torch")
    expression = "windowed[size=2/3,shift=1,grid=5,bias=true]"
    m, _, _ = problem(expression, 10)
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda x: m(**x, backend="torch"), fullgraph=True, backend=backend, dynamic=True
    )
    for tokens in (10, 15, 23):
        x = {name: torch.asarray(array) for name, array in problem(expression, tokens)[1].items()}
        torch.testing.assert_close(compiled(x), m(**x, backend="reference"))
    assert len(graphs) == 1
