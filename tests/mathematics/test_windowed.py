"""Windowed attention against dense attention over the pairs of a window, and its own identities."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close, assert_gradients_are_central_differences
from tests.mathematics.loops import dot_scores, read

B, H, N, D, E = 2, 4, 2, 6, 5


def problem(tokens, seed=0, heads=H, kv_heads=N):
    rng = np.random.default_rng(seed)
    return {
        "q": rng.normal(size=(B, tokens, heads, D)),
        "k": rng.normal(size=(B, tokens, kv_heads, D)),
        "v": rng.normal(size=(B, tokens, kv_heads, E)),
    }


def cyclic_regions(rows, columns, size, shift):
    """Swin's shift: for each token, its window after the roll, and its part of the rolled image."""
    window, region = {}, {}
    padded = [-(-n // w) * w for n, w in zip((rows, columns), size, strict=True)]
    for r, c in np.ndindex(rows, columns):
        rolled = [(x - s) % n for x, s, n in zip((r, c), shift, padded, strict=True)]
        window[r, c] = tuple(x // w for x, w in zip(rolled, size, strict=True))
        region[r, c] = tuple(x >= n - s for x, s, n in zip(rolled, shift, padded, strict=True))
    return window, region


def pair_mask(rows, columns, size, shift):
    window, region = cyclic_regions(rows, columns, size, shift)
    tokens = list(np.ndindex(rows, columns))
    return np.array(
        [[window[i] == window[j] and region[i] == region[j] for j in tokens] for i in tokens]
    )


def gathered_bias(rows, columns, size, table, visible):
    """(h, t, s): table[(Δr + w_r − 1)(2 w_c − 1) + Δc + w_c − 1] for the pairs of a window."""
    tokens = list(np.ndindex(rows, columns))
    bias = np.zeros((table.shape[1], len(tokens), len(tokens)))
    for i, j in zip(*np.nonzero(visible), strict=True):
        (r, c), (r2, c2) = tokens[i], tokens[j]
        entry = (r - r2 + size[0] - 1) * (2 * size[1] - 1) + c - c2 + size[1] - 1
        bias[:, i, j] = table[entry]
    return bias


GRIDS = [
    ((4, 6), (2, 3), (0, 0)),
    ((4, 6), (2, 3), (1, 2)),
    ((4, 4), (2, 2), (1, 1)),
    ((5, 7), (2, 3), (0, 0)),
    ((5, 7), (3, 3), (1, 2)),
    ((3, 4), (3, 4), (0, 0)),
]


def layer_of(grid, size, shift, **options):
    return pa.Windowed(size=size, shift=shift, grid=grid, **options)


@pytest.mark.parametrize(("grid", "size", "shift"), GRIDS)
def test_windows_are_dense_attention_with_a_pair_mask_and_a_gathered_bias(grid, size, shift):
    layer = layer_of(grid, size, shift, bias=True)
    x = problem(grid[0] * grid[1])
    entries = (2 * size[0] - 1) * (2 * size[1] - 1)
    table = np.random.default_rng(1).normal(size=(entries, H))
    visible = pair_mask(*grid, size, shift)
    scores = dot_scores(x["q"], x["k"]) / np.sqrt(D)
    scores = scores + gathered_bias(*grid, size, table, visible)
    expected = read(scores, np.broadcast_to(visible, (B, 1, *visible.shape)), x["v"])
    assert_close(layer(**x, bias_table=table), expected)


@pytest.mark.parametrize(("size", "shift"), [(4, 0), (4, 3), (3, 1)])
def test_windows_of_a_sequence_are_softmax_of_each_window(size, shift):
    tokens = 14
    x = problem(tokens)
    out = pa.Windowed(size=size, shift=shift)(**x)
    starts = [*range(shift - size if shift else 0, tokens, size)]
    for start in starts:
        part = slice(max(start, 0), start + size)
        alone = pa.Softmax(causal=False)(*(x[name][:, part] for name in "qkv"))
        assert_close(out[:, part], alone)


def test_one_window_is_softmax():
    x = problem(12)
    expected = pa.Softmax(causal=False)(**x)
    assert_close(pa.Windowed(size=12)(**x), expected)
    assert_close(pa.Windowed(size=(3, 4), grid=(3, 4))(**x), expected)


@pytest.mark.parametrize(
    "outer",
    [
        *("row_normalized", "row_normalized[axis=channel,detach=false]", "laser", "differential"),
        *("temperature", "per_dim_scale", "qk_norm"),
    ],
)
def test_compositions_on_one_window_are_those_on_softmax(outer):
    one, all_tokens = (
        pa.parse(f"{outer}({base})") for base in ("windowed[size=12]", "softmax[causal=false]")
    )
    rng = np.random.default_rng(4)
    sizes = {"b": B, "t": 12, "s": 12, "h": H, "n": N, "d": D, "e": E}
    x = {name: rng.uniform(0.2, 1, p.shape(sizes)) for name, p in one.inputs.items()}
    (out, pullback), (expected, of_softmax) = one.vjp(**x), all_tokens.vjp(**x)
    assert_close(out, expected)
    cotangent = rng.normal(size=out.shape)
    gradients = of_softmax(cotangent)
    for name, gradient in pullback(cotangent).items():
        assert_close(gradient, gradients[name])


def test_a_fixed_number_of_rows_changes_nothing():
    x = problem(35)
    options = {"size": (2, 3), "shift": (1, 1)}
    fixed, free = pa.Windowed(grid=(5, 7), **options), pa.Windowed(grid=7, **options)
    assert_close(fixed(**x), free(**x))


@pytest.mark.parametrize(
    "text",
    [
        "windowed[size=2/3,shift=1/2,grid=3/5,bias=true]",
        "windowed[size=4,shift=1,bias=true]",
        "laser(windowed[size=2,grid=3/5,bias=true])",
        "row_normalized[detach=false](windowed[size=2/3,shift=1,grid=3/5,bias=true])",
        "differential(windowed[size=2,grid=3/5,bias=true])",
        "temperature(windowed[size=2,grid=3/5,bias=true])",
        "per_dim_scale(windowed[size=2,grid=3/5])",
        "qk_norm(windowed[size=2,grid=3/5])",
    ],
)
def test_gradients_are_central_differences(text):
    layer = pa.parse(text)
    rng = np.random.default_rng(2)
    sizes = {"b": 1, "t": 15, "s": 15, "h": 2, "n": 1, "d": 3, "e": 2}
    x = {}
    for name, pattern in layer.inputs.items():
        x[name] = np.abs(rng.normal(size=pattern.shape(sizes))) if name == "tau" else None
        x[name] = rng.normal(size=pattern.shape(sizes)) if x[name] is None else x[name] + 0.5
        x[name] = np.asarray(x[name])
    assert_gradients_are_central_differences(layer, x, rng.normal(size=(1, 15, 2, 2)))


def test_entries_without_a_pair_have_the_gradient_zero():
    x = {**problem(3), "bias_table": np.ones((7, H))}
    out, pullback = pa.Windowed(size=4, bias=True).vjp(**x)
    gradient = pullback(np.random.default_rng(3).normal(size=out.shape))["bias_table"]
    assert (gradient[[0, 6]] == 0).all()
    assert (gradient[1:6] != 0).all()


def test_a_packed_sequence_has_a_grid_of_its_own():
    layer = pa.Windowed(size=2, shift=1, grid=3)
    x = problem(15)
    ids = np.array([[0] * 6 + [1] * 9, [5] * 9 + [7] * 6])
    out = layer(**x, segment_ids=ids)
    for i, cut in enumerate((6, 9)):
        for part in (slice(0, cut), slice(cut, 15)):
            alone = layer(*(x[name][i : i + 1, part] for name in "qkv"))
            assert_close(out[i : i + 1, part], alone)


def test_lengths_and_masked_keys_are_left_out_of_their_windows():
    layer = pa.Windowed(size=(2, 2), grid=(3, 4))
    x = problem(12)
    changed = {name: array.copy() for name, array in x.items()}
    mask = np.ones((B, 12), dtype=bool)
    mask[0, [1, 4]] = mask[1, 11] = False
    for name in "kv":
        changed[name][~mask] = 100.0
    assert_close(layer(**x, key_mask=mask), layer(**changed, key_mask=mask))
    assert np.abs(layer(**x, key_mask=mask) - layer(**x)).max() > 0.1
    out = layer(**x, lengths=[5, 12])
    assert (out[0, 5:] == 0).all()
    window = [0, 1, 4]
    alone = pa.Softmax(causal=False)(*(x[name][:1, window] for name in "qkv"))
    assert_close(out[:1, window], alone)


def test_the_queries_of_a_shorter_call_are_the_last_tokens():
    layer = pa.Windowed(size=(2, 3), shift=1, grid=(3, 5))
    x = problem(15)
    assert_close(layer(x["q"][:, 11:], x["k"], x["v"]), layer(**x)[:, 11:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windowed[size=5,grid=3/4]", "windows must fit into the grid"),
        ("windowed[size=2/5,grid=4]", "windows must fit into the grid"),
        ("windowed[size=4,shift=4]", "shift must be below size"),
        ("windowed[size=2/3,shift=2/1,grid=4/4]", "shift must be below size"),
        ("windowed[size=2/3]", "grid=none has one axis"),
        ("windowed[size=0]", "option size must be a whole number, 1 or above"),
        ("windowed[size=2/2/2]", "two of them"),
        ("windowed[causal=true]", "has no option 'causal'"),
    ],
)
def test_options_that_do_not_fit_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        pa.parse(text)


def test_calls_that_do_not_fit_are_named():
    x = problem(12)
    layer = pa.Windowed(size=2, grid=(3, 5))
    with pytest.raises(pa.ShapeError, match="3 rows and 5 columns has 15 tokens; found s = 12"):
        layer(**x)
    with pytest.raises(pa.ShapeError, match="has 15 tokens"):
        pa.RowNormalized(layer)(**x)
    with pytest.raises(pa.ShapeError, match="found t = 12 and s = 5"):
        pa.Windowed()(x["q"], x["k"][:, :5], x["v"][:, :5])
    with pytest.raises(ValueError, match="packed sequences have a grid each"):
        pa.Windowed(size=2, grid=(3, 4))(**x, segment_ids=np.zeros((B, 12), dtype=int))
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.Windowed().init_cache(**x)
    with pytest.raises(TypeError, match="unknown keyword 'causal'"):
        pa.windowed(**x, causal=True)
    with pytest.raises(pa.ShapeError, match="bias_table"):
        pa.Windowed(bias=True)(**x, bias_table=np.ones((9, H)))


@pytest.mark.parametrize(
    ("outer", "reason"),
    [
        ("lucid", "without causality, lucid needs one score"),
        ("ccq", "the base is not causal"),
    ],
)
def test_what_makes_no_sense_around_windows_is_refused(outer, reason):
    with pytest.raises(TypeError, match=reason):
        pa.parse(f"{outer}(windowed)")


def test_options_of_equal_mechanisms_have_equal_text():
    assert pa.Windowed(size=(7, 7), grid=(14, 14)) == pa.Windowed(size=7, grid=(14, 14))
    text = "windowed[size=2/3,shift=1,grid=4/6,bias=true]"
    assert str(pa.parse(text)) == text
