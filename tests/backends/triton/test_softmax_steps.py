"""Steps of LASER by Triton's kernels, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from tests.backends.triton.tiles import error, small_tiles

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
WITH_OPTIONS = "laser(softmax[window=5,bias=true,distance=slopes])"


def inputs(mechanism, t, *, b=2, h=4, n=2, d=8, e=12, dtype=torch.float32, spread=1.0):
    """Inputs in which the values of a channel are about `spread` apart."""
    torch.manual_seed(t)
    sizes = {"b": b, "t": t, "s": t, "h": h, "n": n, "d": d, "e": e, "c": t + 3}
    patterns = pa.parse(mechanism).inputs.extending().items()
    x = {name: torch.randn(pattern.shape(sizes)) for name, pattern in patterns}
    x["v"] *= spread
    return {name: a.to(dtype) for name, a in x.items()}


def check(mechanism, x, *, first, new=1, past=None, counts=None, is_visible=None):
    """All outputs after the first `first` tokens, `new` at a time, are those of the definition.

    `past` and `counts` are the tokens of each sequence, in the cache and in each step. Keys that
    are not `is_visible` (b, t) are masked.
    """
    layer, t, dtype = pa.parse(mechanism), x["v"].shape[1], x["v"].dtype
    wide = {name: a.double() for name, a in x.items()}
    capacity = {"capacity": t + 3} if is_visible is None else {"capacity": t + 3, "key_mask": True}
    caches = [layer.init_cache(**each, **capacity) for each in (x, wide)]
    bounds = [(0, first)] if first else []
    bounds += [(low, min(low + new, t)) for low in range(first, t, new)]
    lengths = [past] * bool(first) + (counts or [None] * (len(bounds) - bool(first)))
    for at, ((low, high), count) in enumerate(zip(bounds, lengths, strict=True)):
        masks = {} if count is None else {"lengths": torch.tensor(count)}
        if is_visible is not None:
            masks["key_mask"] = is_visible[:, low:high]
        outs = []
        for i, (each, backend) in enumerate(((x, "triton"), (wide, "reference"))):
            part = {
                n: a[:, :, low:high] if n == "bias" else a[:, low:high] if a.ndim > 1 else a
                for n, a in each.items()
            }
            is_prefill = at == 0 and first
            with torch.no_grad(), small_tiles(at):
                out, caches[i] = layer.extend(
                    caches[i], **part, **masks, backend="torch" if is_prefill else backend
                )
            outs.append(out)
        assert outs[0].dtype == dtype
        assert error(*outs) < BOUND[dtype]
    for name, buffer in caches[0].store.items():
        torch.testing.assert_close(buffer.double(), caches[1].store[name].double())


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("h", "n", "first"), [(4, 2, 33), (2, 2, 0), (9, 1, 16)])
def test_one_token_at_a_time(dtype, h, n, first):
    """33 tokens are read in parts, 0 in none; 9 heads need a tile of more than 16 rows twice."""
    check("laser", inputs("laser", first + 2, h=h, n=n, dtype=dtype), first=first)


@pytest.mark.parametrize("base", ["", "window=3", "window=9"])
def test_several_tokens_at_a_time(base):
    mechanism = f"laser(softmax[{base}])" if base else "laser"
    check(mechanism, inputs(mechanism, 27), first=21, new=3)


@pytest.mark.parametrize(
    "options",
    ["bias=true", "softcap=2", "distance=slopes", "window=9,bias=true,softcap=2,distance=slopes"],
)
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_options_of_scores_in_a_step_of_laser(options, spread):
    mechanism = f"laser(softmax[{options}])"
    x = inputs(mechanism, 24, h=6, spread=spread)
    if "slopes" in x:
        x["slopes"] = 0.1 * x["slopes"].abs()
    check(mechanism, x, first=20, new=2)


@pytest.mark.parametrize("mechanism", ["laser", WITH_OPTIONS])
def test_sequences_of_unequal_lengths(mechanism):
    """One sequence begins with a step, and one gets no token in it."""
    x, counts = inputs(mechanism, 22, b=3), [[2, 1, 0], [0, 2, 1]]
    check(mechanism, x, first=18, new=2, past=[18, 0, 7], counts=counts)


@pytest.mark.parametrize("masked", [3, 19, 20])
def test_a_masked_key_may_be_nan(masked):
    x = inputs("laser", 21, b=1)
    for name in "kv":
        x[name][:, masked] = torch.nan
    check("laser", x, first=19, is_visible=torch.arange(21)[None] != masked)


@pytest.mark.parametrize(("spread", "scale"), [(30.0, 100.0), (100.0, 1000.0), (1e30, 1.0)])
def test_values_far_apart_are_read_exactly_by_laser(spread, scale):
    """The keys with the largest values of a channel have hardly any weight, or they decide."""
    x = inputs("laser", 36, spread=spread)
    x["k"] *= scale
    check("laser", x, first=34, new=2)


def test_channels_that_are_far_apart_beside_channels_that_are_close():
    x = inputs("laser", 36, spread=torch.logspace(-3, 3, 12))
    x["v"] = x["v"] + 100.0
    check("laser", x, first=35)


def test_keys_of_zeros_and_large_scores():
    x = inputs("laser", 36)
    x["k"] = torch.where(torch.arange(36)[None, :, None, None] % 3 == 0, 0.0, 100 * x["k"])
    check("laser", x, first=34)


def test_too_many_rows_and_wide_values_are_declined():
    for size, reason in (({"e": 300}, "e=300"), ({"h": 66, "n": 1}, "t=1 and 66")):
        x = inputs("laser", 1, b=1, **size)
        cache = pa.parse("laser").init_cache(**x, capacity=2)
        with pytest.raises(pa.UnsupportedError, match=reason), torch.no_grad():
            pa.parse("laser").extend(cache, **x, backend="triton")
