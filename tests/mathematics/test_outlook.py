"""Outlook attention against loops over windows of an image, and its own identities."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close

B, H, N, E = 2, 4, 2, 3


def problem(tokens, w, seed=0):
    rng = np.random.default_rng(seed)
    logits, v = rng.normal(size=(B, tokens, H, w, w)), rng.normal(size=(B, tokens, N, E))
    return {"logits": logits, "v": v}


def by_loops(logits, v, grid, size, stride, scale, keep=None):
    """Window by window, sharing nothing with the leaf; tokens to `keep` (b, t) are there."""
    there = np.ones((B, *grid), bool) if keep is None else keep.reshape(B, *grid)
    image, by_place = (x.reshape(B, *grid, *x.shape[2:]) for x in (v, logits))
    out = np.zeros((B, *grid, H, E))
    cells = [-(-n // step) for n, step in zip(grid, stride, strict=True)]
    for b, head, r, c in np.ndindex(B, H, *cells):
        r, c = r * stride[0], c * stride[1]
        cell = b, slice(r, r + stride[0]), slice(c, c + stride[1])
        if not there[cell].any():
            continue
        weights = np.exp(scale * by_place[cell][there[cell]][:, head].mean(axis=0))
        weights /= weights.sum(axis=1, keepdims=True)
        places = [(r + i - size[0] // 2, c + j - size[1] // 2) for i, j in np.ndindex(*size)]
        slots = [
            (slot, b, *place)
            for slot, place in enumerate(places)
            if all(0 <= x < n for x, n in zip(place, grid, strict=True)) and there[(b, *place)]
        ]
        for to, *receiver in slots:
            for of, *giver in slots:
                out[*receiver, head] += weights[to, of] * image[*giver, head * N // H]
    return out.reshape(B, -1, H, E)


GRIDS = [
    ((4, 5), (3, 3), (1, 1)),
    ((4, 6), (3, 3), (2, 2)),
    ((5, 7), (3, 3), (2, 2)),
    ((3, 4), (2, 5), (1, 1)),
    ((5, 4), (4, 1), (2, 3)),
    ((2, 2), (5, 5), (3, 1)),
]


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize(("grid", "size", "stride"), GRIDS)
def test_the_output_is_that_of_loops_over_windows(grid, size, stride, backend):
    tokens = grid[0] * grid[1]
    x = problem(tokens, size[0] * size[1])
    expected = by_loops(**x, grid=grid, size=size, stride=stride, scale=0.7)
    fixed = pa.Outlook(size=size, stride=stride, grid=grid, scale=0.7)
    assert_close(fixed(**x, backend=backend), expected)
    free = pa.Outlook(size=size, stride=stride, grid=grid[1], scale=0.7)
    assert_close(free(**x, backend=backend), expected)


def test_the_scale_is_that_of_the_width_of_values():
    x = problem(12, 9)
    found = pa.Outlook(grid=(3, 4))(**x)
    assert_close(found, pa.Outlook(grid=(3, 4), scale=E**-0.5)(**x))


def test_a_sequence_is_a_grid_of_one_row():
    x = problem(11, 3)
    for stride in (1, 2):
        row = pa.Outlook(size=(1, 3), stride=(1, stride), grid=(1, 11))
        assert_close(pa.Outlook(size=3, stride=stride)(**x), row(**x))


def test_inside_an_image_weights_sum_to_the_number_of_windows_that_reach_a_token():
    x = problem(49, 9) | {"v": np.ones((B, 49, N, E))}
    image = pa.Outlook(grid=(7, 7))(**x).reshape(B, 7, 7, H, E)
    assert_close(image[:, 2:5, 2:5], np.full((B, 3, 3, H, E), 9.0))
    assert (image[:, 0] < 6).all()  # Six windows reach it, some of whose weights are outside.


def without(x, masked):
    return {name: np.delete(array[:1], masked, axis=1) for name, array in x.items()}


def test_padding_is_a_border_and_a_packed_segment_has_a_grid_of_its_own():
    x, attn = problem(23, 9), pa.Outlook(size=3, stride=2, grid=4)
    x["logits"][0, 10:] = x["v"][0, 10:] = np.nan
    alone = attn(**without(x, range(10, 23)))
    out = attn(**x, lengths=[10, 23])
    assert_close(out[:1, :10], alone)
    assert not out[0, 10:].any()
    x = problem(23, 9)
    ids = np.asarray([[0] * 10 + [1] * 13, [2] * 23])
    for backend in ("reference", "portable"):
        packed = attn(**x, segment_ids=ids, backend=backend)
        assert_close(packed[:1, :10], alone)
        assert_close(packed[:1, 10:], attn(**without(x, range(10))))


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_masked_token_gives_nothing_gets_nothing_and_is_in_no_mean(stride, backend):
    x, keep = problem(20, 9), np.random.default_rng(2).random((B, 20)) < 0.6
    keep[0, :2] = keep[0, 5:7] = False  # A cell without tokens.
    sizes = {"size": (3, 3), "stride": (stride, stride), "grid": (4, 5)}
    expected = by_loops(**x, **sizes, scale=1.0, keep=keep)
    x["logits"][~keep] = x["v"][~keep] = np.nan
    assert_close(pa.Outlook(**sizes, scale=1)(**x, key_mask=keep, backend=backend), expected)


def test_row_normalized_makes_the_output_of_each_token_one_long():
    x = problem(12, 9)
    rows = pa.Outlook(grid=(3, 4))(**x)
    lengths = np.linalg.vector_norm(rows, axis=-1, keepdims=True)
    assert_close(pa.parse("row_normalized(outlook[grid=3/4])")(**x), rows / lengths)


def test_its_differential_has_a_second_input_of_logits():
    x, second = problem(12, 9), problem(12, 9, seed=5)["logits"]
    m = pa.parse("differential[paired=logits](outlook[grid=3/4])")
    one, two = (pa.Outlook(grid=(3, 4))(logits, x["v"]) for logits in (x["logits"], second))
    assert_close(m(**x, logits2=second, lam=np.asarray(0.4)), one - 0.4 * two)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("laser(outlook)", "reads a mean of its values"),
        ("lucid(outlook)", "windows, landmarks and channels have none"),
        ("temperature(outlook)", "it reads q, and outlook takes logits, v"),
        ("qk_norm(outlook)", "it changes k, q, and outlook takes logits, v"),
        (
            "differential(outlook)",
            r"takes logits, v; write differential\[paired=logits\]\(outlook\)",
        ),
        ("ccq(outlook)", "the base is not causal"),
        ("row_normalized(row_normalized(outlook))", "length 1 already"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(expression, reason):
    with pytest.raises(TypeError, match=reason):
        pa.parse(expression)


def test_bad_input_is_named():
    x = problem(12, 9)
    with pytest.raises(ValueError, match=r"logits is declared \(b t h 9 9\), found shape"):
        pa.Outlook(grid=(3, 4))(x["logits"][..., :8], x["v"])
    with pytest.raises(ValueError, match=r"3 rows and 5 columns has 15 tokens; found s = 12"):
        pa.Outlook(grid=(3, 5))(**x)
    with pytest.raises(ValueError, match=r"the same tokens.*found t = 12 and s = 11"):
        pa.Outlook(grid=4)(x["logits"], x["v"][:, :11])
    with pytest.raises(ValueError, match="together fill one; give grid=4"):
        pa.Outlook(grid=(3, 4))(**x, segment_ids=np.zeros((B, 12), dtype=int))
    with pytest.raises(ValueError, match="grid=none has one axis"):
        pa.parse("outlook[size=2/3]")
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.Outlook(grid=(3, 4)).init_cache(**x)
    assert pa.Outlook(size=(3, 3), stride=(2, 2), grid=(4, 5)) == pa.parse(
        "outlook[size=3,stride=2,grid=4/5]"
    )
