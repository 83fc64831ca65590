"""New tokens of LUCID in PaTH's metric after a cache, against the definition's own step."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import Request
from precondattn_triton.lucid.path_step import LucidPathStep
from precondattn_triton.lucid.solve import LucidSolveKernels
from tests.backends.triton.test_path_extension import check, check_unequal, extended
from tests.backends.triton.tiles import error


def inputs(t, *, b=2, h=2, n=1, d=8, e=16, dtype=torch.float32, beta=False):
    """Keys in a cluster, and some equal; directions are nearly orthogonal to the cluster."""
    torch.manual_seed(t)
    k = 0.3 * torch.randn(b, t, n, d) + torch.eye(d)[0]
    k[:, 2:5] = k[:, 2:3]
    w = torch.randn(b, t, n, d)
    w[..., 0] *= 0.2
    x = {"q": torch.randn(b, t, h, d), "k": k, "v": torch.randn(b, t, n, e)}
    x |= {"w": torch.nn.functional.normalize(w, dim=-1), "beta": 2 * torch.rand(b, t, n)}
    if beta:
        x["lucid_beta"] = 2 * torch.rand(b, t, n)
        x["lucid_beta"][:, ::4] = 0
    return {name: a.to(dtype) for name, a in x.items()}


@pytest.mark.parametrize(
    ("flush", "borders"),
    [
        (1, (16, 33, 71)),  # Three chunks of reflections among the new tokens.
        (3, (4, 5, 6, 21)),
        (8, (16, 31, 34)),
        (64, (20, 40)),  # No key of the cache has been flushed.
    ],
)
def test_a_cache_divided_anywhere(flush, borders):
    check(pa.Lucid(pa.Path(flush=flush)), inputs(borders[-1], h=4, n=2), borders)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flush", [1, 8])
def test_half_precision(dtype, flush):
    check(pa.Lucid(pa.Path(flush=flush)), inputs(40, h=4, n=2, dtype=dtype), (19, 20, 40))


def test_strengths_of_reflections_in_float32():
    """β of a pending token is not rounded to the dtype of the keys."""
    x = {name: a for name, a in inputs(40, d=32, dtype=torch.bfloat16).items() if name != "q"}
    x["beta"] = inputs(40, d=32)["beta"]
    rounded = {**x, "beta": x["beta"].clone()}
    rounded["beta"][:, :39] = x["beta"][:, :39].bfloat16()
    leaf = pa.LucidSolve(metric="transported/64")
    ours, other = (extended(leaf, given, (39, 40), "triton")[0] for given in (x, rounded))
    assert error(ours, extended(leaf, x, (39, 40), "reference")[0]) < 2e-2
    assert not torch.equal(ours, other)


def test_values_beyond_the_range_of_float16():
    """Scores of a cluster are near 1, so that its values nearly cancel."""
    x = inputs(40, dtype=torch.bfloat16)
    x["v"] *= 1e6
    check(pa.Lucid(pa.Path(flush=8)), x, (21, 40))


@pytest.mark.parametrize("flush", [1, 6])
def test_a_strength_of_each_token(flush):
    check(pa.Lucid(pa.Path(flush=flush), beta=True), inputs(30, beta=True), (10, 11, 30))


@pytest.mark.parametrize("flush", [1, 5])
def test_sequences_of_unequal_lengths_and_numbers_of_new_tokens(flush):
    check_unequal(pa.Lucid(pa.Path(flush=flush)), inputs(39, b=3, h=2))


@pytest.mark.parametrize("flush", [1, 8])
def test_masked_keys_of_the_cache_and_among_the_new_ones(flush):
    torch.manual_seed(0)
    x, is_visible = inputs(40), torch.rand(2, 40) > 0.3
    is_visible[1, :22] = False
    for name in ("k", "v"):
        x[name][~is_visible] = torch.nan
    check(pa.Lucid(pa.Path(flush=flush)), x, (19, 40), is_visible=is_visible)


def test_slots_of_masked_keys_may_contain_anything():
    x, is_visible, m = inputs(30), torch.ones(2, 30, dtype=torch.bool), pa.Lucid(pa.Path())
    is_visible[:, 3:7] = False
    first, new = (
        {name: a[:, part] for name, a in x.items()} for part in (slice(20), slice(20, 30))
    )
    outs = []
    for fill in (0.0, torch.nan):
        cache = m.init_cache(**x, capacity=32, key_mask=True)
        _, cache = m.extend(cache, **first, key_mask=is_visible[:, :20], backend="reference")
        for name in ("y", "path(k,w,beta)"):
            cache.store[name][:, 3:7] = fill
        outs.append(m.extend(cache, **new, key_mask=is_visible[:, 20:], backend="triton")[0])
    assert torch.equal(*outs)


def test_a_value_of_which_little_is_left():
    """Φ of two keys with entries ±1 is e⁻², and y what bfloat16 rounds off the value."""
    ones = torch.ones(1, 2, 1, 4)
    x = {"k": ones * torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1]])[None, :, None]}
    x |= {"v": 1024 * ones * torch.tensor([1.0, 0.13533528])[None, :, None, None]}
    x |= {"w": ones / 2, "beta": torch.zeros(1, 2, 1)}
    x = {name: a.bfloat16() for name, a in x.items()}
    y, expected = (
        extended(pa.LucidSolve(metric="transported"), x, (1, 2), name)[0]
        for name in ("triton", "reference")
    )
    assert error(y, expected) < 2e-2


def test_zero_keys_and_equal_directions_of_full_strength():
    x = inputs(52, b=1)
    x["w"] = x["w"][:, :1].expand_as(x["w"]).clone()
    x["beta"] = torch.full_like(x["beta"], 2.0)
    x["k"][:, 16:19], x["k"][:, 30:34], x["w"][:, 40:45] = 0, 0, 0
    check(pa.Lucid(pa.Path(flush=4)), x, (18, 52))


def test_many_cached_keys_are_read_in_parts(monkeypatch):
    monkeypatch.setattr("precondattn_triton.decoding.processors", lambda like: 3)
    check(pa.Lucid(pa.Path(flush=4)), inputs(75, b=1, e=20), (72, 75))


@pytest.mark.parametrize("normalize", ["keys", "given"])
def test_the_solve_alone_transports_its_keys(normalize):
    """The cache has no norms of keys that were normalised before."""
    leaf = pa.LucidSolve(metric="transported/4", normalize=normalize)
    x = {name: a for name, a in inputs(33, n=2).items() if name != "q"}
    result, expected = (extended(leaf, x, (14, 33), name) for name in ("triton", "reference"))
    for one, other in zip(result, expected, strict=True):
        assert error(one, other) < 2e-5


def request(t=2, *, d=128, masks=()):
    shapes = {"q": (1, t, 2, d), "k": (1, t, 1, d), "v": (1, t, 1, 128)}
    return Request("extend", "torch", "cuda", "bfloat16", tuple(shapes.items()), frozenset(masks))


def test_keys_of_up_to_128_channels_are_supported():
    solve, kernels = pa.LucidSolve(metric="transported"), LucidSolveKernels()
    assert kernels.refuses(solve, request(t=1)) is None
    assert "found d=192" in kernels.refuses(solve, request(d=192))
    assert "packed" in kernels.refuses(solve, request(masks=("segment_ids",)))


def test_a_group_of_other_scores_or_reflections_is_no_step():
    group = LucidPathStep()
    assert group.refuses(pa.Lucid(pa.Path(flush=2)), request()) is None
    assert "same keys" in group.refuses(pa.Lucid(pa.Path(), metric="dot"), request())
    assert "found d=192" in group.refuses(pa.Lucid(pa.Path()), request(d=192))
