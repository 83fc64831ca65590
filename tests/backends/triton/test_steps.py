"""New tokens after a cache by Triton's kernels, interpreted, against the definition's own step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from tests.backends.triton.calls import (
    BACKENDS,
    DTYPES,
    OF_SCORES,
    SMALL_BLOCKS,
    KernelCall,
    both,
    cluster,
    doubled,
    error,
    scaled,
    thorough,
)
from tests.backends.triton.tiles import small_tiles

BOUND = dict(zip(DTYPES, (1e-5, 2e-3, 1e-2), strict=True))


@dataclass(frozen=True)
class Steps(KernelCall):
    """A cache that is extended by the tokens between borders."""

    b: int = 2
    h: int = 2
    d: int = 8
    e: int = 12
    backend: str | tuple[str, ...] = "triton"
    borders: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    """The new tokens of each sequence in each extension."""
    hidden: int | None = None
    """A token whose key is masked; -1 for three of ten tokens, and the first ones of a sequence."""
    from_empty: bool = False
    """Whether the kernels make the first extension too."""

    def check(self):
        """Outputs and buffers of the cache are those of the definition in float64."""
        mechanism, (x, _), masks = self.mechanism, self.arrays(), self.masks()
        options = {"capacity": self.borders[-1] + 3}
        if self.hidden is not None:
            options["key_mask"] = True
        exact = doubled(x)
        cache, right = (mechanism.init_cache(**each, **options) for each in (x, exact))
        dtypes = {name: buffer.dtype for name, buffer in cache.store.items()}
        bound = self.bound or BOUND[self.dtype]
        for number, ((low, high), given) in enumerate(
            zip(pairwise((0, *self.borders)), masks, strict=True)
        ):
            ours = self.backend if number or self.from_empty else "reference"
            with ExitStack() as stack:
                for target, value in {**SMALL_BLOCKS, **self.patches}.items():
                    stack.enter_context(patch(target, value))
                stack.enter_context(small_tiles(number))
                stack.enter_context(torch.no_grad())
                out, cache = mechanism.extend(
                    cache, **self.part(x, low, high), **given, backend=ours
                )
            expected, right = mechanism.extend(
                right, **self.part(exact, low, high), **given, backend="reference"
            )
            assert str(out.dtype)[6:] == self.dtype
            assert (difference := of(out, expected)) < bound, (number, difference)
        for name, buffer in right.store.items():
            found, is_known = cache.store[name], buffer.isfinite()
            assert found.dtype == dtypes[name], name
            assert of(found[is_known], buffer[is_known]) < bound, name

    def arrays(self):
        x, d_out = super().arrays()
        if "bias" in x:  # It has a column for each token of the cache.
            x["bias"] = torch.nn.functional.pad(x["bias"], (0, 3))
        if self.hidden is not None:
            for name in {"k", "k2", "v"} & {*x}:
                x[name][~self.is_visible()] = torch.nan
        return x, d_out

    def is_visible(self):
        if self.hidden == -1:
            is_seen = torch.rand(2, self.t, generator=torch.Generator().manual_seed(0)) > 0.3
            is_seen[1, :22] = False
            return is_seen
        return (torch.arange(self.t) != self.hidden).expand(self.b, self.t)

    def masks(self):
        found = [{} for _ in self.borders]
        for masks, count in zip(found, self.counts, strict=False):
            masks["lengths"] = torch.tensor(count)
        if self.hidden is not None:
            for masks, (low, high) in zip(found, pairwise((0, *self.borders)), strict=True):
                masks["key_mask"] = self.is_visible()[:, low:high]
        return found

    def part(self, x, low, high):
        def of_tokens(name, array):
            if name == "bias":
                return array[:, :, low:high]
            return array[:, low:high] if array.ndim > 1 else array

        return {name: of_tokens(name, array) for name, array in x.items()}


def of(found, expected):
    return error(found.double().numpy(), expected.double().numpy(), 0.0, 0.1)


def row(name, expression, borders, *, marks=(), **options):
    made = Steps(expression, borders[-1], borders=borders, **options)
    return pytest.param(made, id=name, marks=marks)


def rows(*params):
    return pytest.mark.parametrize("steps", params)


def channels_apart(x, _):
    x["v"].mul_(torch.logspace(-3, 3, 12)).add_(100)


ALL = "laser(softmax[window=9,bias=true,softcap=2,distance=slopes])"
FAR = scaled(v=100)
GENTLE = scaled(slopes=0.1)
UNEQUAL = {"counts": ((18, 0, 7), (2, 0, 1), (1, 2, 0)), "b": 3, "h": 4, "n": 2}


@rows(
    # 33 tokens are read in parts, 0 in none; 9 heads need a tile of more than 16 rows twice.
    row("laser", "laser", (33, 34, 35), h=4, n=2),
    row("laser from nothing", "laser", (1, 2), n=2, dtype="bfloat16", from_empty=True),
    row("several tokens, small window", "laser(softmax[window=3])", (21, 24, 27), h=4, n=2),
    row(
        "bias, far apart", "laser(softmax[bias=true])", (20, 22, 24), h=6, n=2, change=FAR,
        marks=thorough,
    ),
    row("slopes, far apart", "laser(softmax[distance=slopes])", (20, 22), h=6, n=2,
        change=scaled(slopes=0.1, v=100), marks=thorough),
    row("all options", ALL, (20, 22, 24), h=6, n=2, change=GENTLE),
    # One sequence begins with a step, and one gets no token in it.
    row("unequal lengths", "laser", (18, 20, 22), **UNEQUAL),
    row("masked new key", "laser", (19, 20, 21), b=1, hidden=20),
    row("masked key of the cache", "laser", (19, 20, 21), b=1, hidden=3),
    # The keys with the largest values of a channel have hardly any weight, or they decide.
    *(
        row(f"values of {spread}, keys of {scale}", "laser", (34, 36), h=4, n=2,
            change=scaled(v=spread, k=scale))
        for spread, scale in ((100.0, 1000.0), (1e30, 1.0))
    ),
    row(
        "channels far apart and close", "laser", (35, 36), h=4, n=2, change=channels_apart,
        marks=thorough,
    ),
)  # fmt: skip
def test_laser(steps):
    steps.check()


def full_strength(x, _):
    """Clustered keys, equal directions of full strength, and rows of zeros."""
    x["k"].mul_(0.01).add_(x["k"][:, :1] * 100)
    x["w"].copy_(x["w"][:, :1].expand_as(x["w"]).clone())
    x["beta"].fill_(2)
    x["k"][:, 30:34], x["w"][:, 40:45] = 0, 0


IN_PARTS = {"precondattn_triton.decoding.processors": lambda like: 3}
# The second sequence has no token at first; the third gets none, and is not flushed.
THREE = {"b": 3, "counts": ((20, 0, 9), (7, 19, 0), (20, 20, 20))}
HALF = {"bound": OF_SCORES["bfloat16"], "dtype": "bfloat16"}


@rows(
    row("one by one across flushes", "path[flush=1]", (4, 5, 6, 7)),
    row("one by one in float16", "path[flush=3]", (5, 6, 7, 8), h=4, n=2, dtype="float16"),
    row("one by one, many keys in parts", "path[flush=8]", (44, 45, 46), b=1, n=2),
    row("window among keys since a flush", "path[window=2,flush=5]", (5, 6, 7, 8, 9, 10)),
    # The next token of the sequence that gets none would cause a flush.
    row(
        "one by one, not flushed", "path[flush=3]", (5, 6, 7, 8),
        counts=((5, 2), (0, 1), (1, 0), (1, 1)),
    ),
    row("masked key before a flush", "path[flush=4]", (4, 5, 6, 7, 8), b=1, hidden=2),
    row("short flushes", "path[flush=3]", (4, 6, 21), h=4, n=2),
    row("a full call", "path[flush=4]", (37,), from_empty=True),
    row("small window", "path[window=5,flush=6]", (20, 40)),
    row("small window, unequal", "path[window=5,flush=6]", (20, 40), counts=((20, 20), (1, 20))),
    row("three sequences, flush of each token", "path[flush=1]", (20, 39, 59), **THREE),
    row("three sequences", "path[flush=5]", (20, 39, 59), **THREE, marks=thorough),
    row("masked keys", "path[flush=8]", (19, 40), hidden=-1),
    row("full strength", "path[flush=4]", (18, 52), b=1, change=full_strength),
    row("many keys in parts", "path[flush=4]", (72, 75), b=1, h=3, patches=IN_PARTS),
)  # fmt: skip
def test_path(steps):
    steps.check()


def test_keys_of_path_in_half_precision_are_transported_in_float32():
    x, _ = Steps("path", 90, b=1, dtype="bfloat16").arrays()
    stores = []
    for backend in ("triton", "reference"):
        cache = pa.Path().init_cache(**x, capacity=90)
        for low, high in pairwise((0, 10, 50, 90)):
            new = {name: array[:, low:high] for name, array in x.items()}
            with torch.no_grad(), small_tiles():
                _, cache = pa.Path().extend(cache, **new, backend=backend if low else "reference")
        stores.append(cache.store)
    of_float32 = [name for name, buffer in stores[0].items() if buffer.dtype == torch.float32]
    assert of_float32
    assert all(of(stores[0][name], stores[1][name]) < 2e-6 for name in of_float32)


def in_cluster(x, _):
    cluster(x, None)
    if "lucid_beta" in x:
        x["lucid_beta"][:, ::4] = 0


def equal_directions(x, _):
    in_cluster(x, None)
    x["w"].copy_(x["w"][:, :1].expand_as(x["w"]).clone())
    x["beta"].fill_(2)
    x["k"][:, 16:19], x["k"][:, 30:34], x["w"][:, 40:45] = 0, 0, 0


def given_keys(x, _):
    in_cluster(x, None)
    x["k"] /= x["k"].square().mean(-1, keepdim=True).sqrt()


def lucid_path(
    name, flush, borders, *, change=in_cluster, e=16, expression="lucid(path[flush={}])", **options
):
    return row(name, expression.format(flush), borders, change=change, e=e, **options)


@rows(
    lucid_path("short flushes", 3, (4, 5, 6, 21), h=4, n=2),
    lucid_path("float16", 1, (19, 20, 40), h=4, n=2, dtype="float16", bound=5e-3, marks=thorough),
    # Scores of a cluster are near 1, so that its values nearly cancel.
    lucid_path(
        "beyond float16", 8, (21, 40), change=both(in_cluster, scaled(v=1e6)), **HALF,
        marks=thorough,
    ),
    lucid_path(
        "a strength of each token", 1, (10, 11, 30), expression="lucid[beta=true](path[flush={}])",
        marks=thorough,
    ),
    lucid_path("three sequences", 5, (20, 39, 59), **THREE, marks=thorough),
    lucid_path("masked keys", 8, (19, 40), hidden=-1, marks=thorough),
    lucid_path("equal directions", 4, (18, 52), b=1, change=equal_directions),
    lucid_path("many keys in parts", 4, (72, 75), b=1, e=20, patches=IN_PARTS),
    lucid_path(
        # The cache has no norms of keys that were normalised before.
        "solve of given keys", 4, (14, 33), n=2, change=given_keys,
        expression="lucid_solve[metric=transported/{},normalize=given]", marks=thorough,
    ),
)  # fmt: skip
def test_lucid_around_path(steps):
    steps.check()


def extended_by_one(mechanism, x, backend):
    t = x["k"].shape[1]
    cache = mechanism.init_cache(**x, capacity=t)
    first, new = ({n: a[:, part] for n, a in x.items()} for part in (slice(t - 1), slice(t - 1, t)))
    with torch.no_grad(), small_tiles():
        _, cache = mechanism.extend(cache, **first, backend="reference")
        return mechanism.extend(cache, **new, backend=backend)[0]


def test_strengths_of_reflections_stay_in_float32():
    """β of a pending token is not rounded to the dtype of the keys."""
    steps = Steps("lucid(path)", 40, d=32, e=16, dtype="bfloat16", change=in_cluster)
    x = {name: array for name, array in steps.arrays()[0].items() if name != "q"}
    x["beta"] = 2 * torch.rand(2, 40, 1, generator=torch.Generator().manual_seed(0))
    rounded = {**x, "beta": x["beta"].clone()}
    rounded["beta"][:, :39] = x["beta"][:, :39].bfloat16()
    solve = pa.LucidSolve(metric="transported/64")
    ours, other = (extended_by_one(solve, each, "triton") for each in (x, rounded))
    assert of(ours, extended_by_one(solve, x, "reference")) < 2e-2
    assert not torch.equal(ours, other)


def test_a_value_of_which_little_is_left():
    """Φ of two keys with entries ±1 is e⁻², and y what bfloat16 rounds off the value."""
    ones = torch.ones(1, 2, 1, 4)
    x = {"k": ones * torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1]])[None, :, None]}
    x |= {"v": 1024 * ones * torch.tensor([1.0, 0.13533528])[None, :, None, None]}
    x |= {"w": ones / 2, "beta": torch.zeros(1, 2, 1)}
    x = {name: array.bfloat16() for name, array in x.items()}
    solve = pa.LucidSolve(metric="transported")
    found, right = (extended_by_one(solve, x, backend) for backend in ("triton", "reference"))
    assert of(found, right) < 2e-2


def near_each_other(x, _):
    x["k"].mul_(0.3).add_(x["k"][:, :1] / 0.3)
    if "lucid_beta" in x:
        x["lucid_beta"][:, ::4] = 0


def coinciding(x, _):
    near_each_other(x, None)
    x["k"][:, -4:-2] = x["k"][:, :1]
    x["k"][0, -6] = 0


def few(name, expression, borders, **options):
    given = {"h": 2, "n": 2, "change": coinciding, "backend": BACKENDS} | options
    return row(name, expression, borders, **given)


@rows(
    few("one by one", "lucid", (33, 34, 35), h=4, e=20, change=near_each_other, backend="triton"),
    few(
        "one by one, strengths", "lucid[beta=true]", (33, 34, 35), h=16, n=1,
        change=near_each_other, dtype="bfloat16", backend="triton",
    ),
    few(
        "one by one, wide keys", "lucid[beta=true]", (33, 34, 35), d=40, e=16,
        change=near_each_other, backend="triton",
    ),
    # One sequence begins with the step, and one has no new token.
    few("one by one, unequal", "lucid", (20, 21), b=3, counts=((20, 0, 7), (1, 1, 0))),
    few("one by one, masked new", "lucid", (5, 6, 7), b=1, n=1, hidden=5, change=None),
    few("a few in float16, masked", "lucid", (21, 28), h=6, hidden=-1, dtype="float16", bound=8e-3),
    # One sequence gets a part of the tokens, then none.
    few("a few, unequal", "lucid", (19, 26, 33), counts=((19, 19), (3, 7), (0, 4))),
    few("many", "lucid", (20, 57), h=4, e=16),
    few(
        "many, masked in float16", "lucid", (16, 50), h=4, e=16, hidden=-1, dtype="float16",
        bound=8e-3,
    ),
    few("many, unequal", "lucid", (33, 50), h=4, e=16, counts=((33, 21), (17, 0))),
)  # fmt: skip
def test_lucid(steps):
    steps.check()
