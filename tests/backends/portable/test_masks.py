"""Masked row blocks; windows far apart; rows without a visible key, or of padded queries."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_portable.arithmetic import IN_PLACE
from precondattn_portable.layout import Tile
from precondattn_portable.masks import Mask
from tests.mathematics.identities import assert_close


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 11, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("t", "size"), [(24, 4), (24, 5), (7, 4), (1, 1)])
def test_row_blocks_are_masked_as_the_definition_says(t, size, strict, causal, window, masked):
    """Blocks whose pairs are at equal distances share a mask, whatever their order."""
    s = 24
    key_mask = np.random.default_rng(0).uniform(size=(1, s)) < 0.7 if masked else None
    frame = full_frame(t, s, np.zeros(1), key_mask=key_mask)
    mask = Mask(frame, s, s - t, causal, window, strict)
    whole = frame.visible(causal=causal, window=window, strict=strict)[0, 0]
    for i0 in [*range(0, t, size), *range(0, t, size)]:
        i1 = min(i0 + size, t)
        low, high = mask.columns(i0, i1)
        row_block = np.ones((1, 1, i1 - i0, high - low))
        found = mask.apply(IN_PLACE, row_block, Tile(i0, i1, low, high), 0.0)
        np.testing.assert_array_equal(found[0, 0] == 1.0, whole[i0:i1, low:high])
        assert not whole[i0:i1, :low].any()
        assert not whole[i0:i1, high:].any()


def test_a_packed_call_with_a_bias_computes_no_blocks_of_other_segments(monkeypatch):
    # A bias relates pairs of tokens, so that the segments can not be moved into a batch.
    # Row blocks have up to 256 rows.
    s, length, widths, columns = 768, 128, [], Mask.columns

    def noted(mask, i0, i1):
        low, high = columns(mask, i0, i1)
        widths.append(high - low)
        return low, high

    monkeypatch.setattr(Mask, "columns", noted)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, s, 1, 4))
    ids = np.arange(s)[None] // length
    m, bias = pa.parse("lucid(softmax[bias=true])"), np.zeros((1, 1, s, s))
    _, pullback = m.vjp(q, k, v, bias=bias, segment_ids=ids, backend="portable")
    pullback(v)
    assert 0 < max(widths) <= 2 * length


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


B, S, D = 2, 6, 4
MASK = np.asarray([[False, False, True, True, True, True], [False, True, True, True, True, True]])
BACKEND = "portable"


def inputs(*, b=B, t=S, s=S):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(b, tokens, 2, D)) for tokens in (t, s, s))
    return q, k, v


@pytest.mark.parametrize(("value", "sink"), [(np.inf, False), (np.nan, True)])
def test_an_infinite_cotangent_of_a_row_without_keys_reaches_no_gradient(value, sink):
    mechanism = pa.Softmax(sink=sink)
    more = {"sink": np.asarray([0.5, -0.5])} if sink else {}
    _, pullback = mechanism.vjp(*inputs(), **more, key_mask=MASK, backend=BACKEND)
    cotangent = np.ones((B, S, 2, D))
    expected = pullback(np.where(MASK[:, :, None, None], cotangent, 0.0))
    found = pullback(np.where(MASK[:, :, None, None], cotangent, value))
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient)


def test_an_infinite_cotangent_of_a_row_with_one_key_is_not_hidden():
    # λ is 0, as the only score is 0.
    q, k, v = inputs(t=1, s=1)
    _, pullback = pa.Softmax().vjp(0 * q, k, v, backend=BACKEND)
    with np.errstate(invalid="ignore"):
        gradients = pullback(np.full((B, 1, 2, D), np.inf))
    assert np.isinf(gradients["v"]).all()


def test_a_bias_of_padded_queries_may_be_nan():
    x, lengths = inputs(), np.asarray([S, 2])
    bias = np.random.default_rng(1).normal(size=(B, 2, S, S))
    is_padding = np.arange(S)[None] >= lengths[:, None]
    padded = np.where(is_padding[:, None, :, None], np.nan, bias)
    mechanism, results = pa.Softmax(bias=True), []
    for each in (bias, padded):
        out, pullback = mechanism.vjp(*x, bias=each, lengths=lengths, backend=BACKEND)
        cache = mechanism.init_cache(*x, bias=each, capacity=S)
        step, _ = mechanism.extend(cache, *x, bias=each, lengths=lengths, backend=BACKEND)
        results.append({"out": out, "step": step, **pullback(np.ones_like(out))})
    for name, expected in results[0].items():
        np.testing.assert_array_equal(results[1][name], expected)


def test_queries_beyond_the_window_of_the_first_key_give_zero():
    # Positions of queries end with that of the last key.
    mechanism = pa.Softmax(causal=False, window=2)
    x = inputs(t=200, s=3)
    for backend in ("reference", BACKEND):
        out, pullback = mechanism.vjp(*x, backend=backend)
        result = {"out": out, **pullback(np.ones_like(out))}
        if backend == "reference":
            expected = result
    assert not result["out"][:, :196].any()
    for name, array in expected.items():
        np.testing.assert_allclose(result[name], array, rtol=1e-12, atol=1e-12)
