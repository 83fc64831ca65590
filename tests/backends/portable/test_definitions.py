"""Algorithms of the portable backend in blocks against their definitions: one table of calls.

A row makes blocks, groups or windows small, so that a short call has several of them.
"""

import math
from itertools import pairwise

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from precondattn_portable import lucid_solve
from precondattn_portable.preconditioned_key import KEY_CHUNK
from precondattn_portable.sizes import ON_CPU

CHUNK = ON_CPU.chunk
OUTLOOK = "sizes.ON_CPU.row_block_entries"
DIRECT = "symmetric_lucid.DIRECT"
WINDOWS = "sizes.ON_CPU.row_block_entries"
SYMMETRIC = "lucid[normalize=queries_and_keys,rho=0.1](softmax[causal=false,bias=true])"


def strict(x):
    library = pytest.importorskip("array_api_strict")
    return {name: library.asarray(array) for name, array in x.items()}


def masks_of(kind, s, b=2):
    rng = np.random.default_rng(1)
    return {
        "none": {},
        "lengths": {"lengths": np.asarray([s - s // 4, s])},
        "keys": {"key_mask": rng.random((b, s)) < 0.7},
        "segments": {"segment_ids": np.sort(rng.integers(3, size=(b, s)), axis=1)},
    }[kind]


def hard(m, x):
    """Closed and strong gates, and keys of 0."""
    s = x["k"].shape[1]
    for name in {"g", "g_atk"} & x.keys():
        x[name][0, s // 2] = x[name][:, s // 3] = -math.inf
        x[name][1, s // 3 + 1 : s // 3 + 20] = -50.0
    if s > 1:
        x["k"][:, s // 4 : s // 4 + min(30, s // 8)] = 0
    return x


def row(expression, s, mask="none", *, t=None, h=4, n=2, library="numpy", **small):
    name = f"{expression}-{s}-{mask}-{library}-{'-'.join(map(str, small.values()))}"
    small = {where.replace("__", "."): size for where, size in small.items()}
    return pytest.param((expression, s, mask, t or s, h, n, library, small), id=name)


ROWS_OF_TABLE = (
    *(
        row(expression, tokens, mask, library=library, **{OUTLOOK: size})
        for expression, tokens, mask, library, size in (
            ("outlook[size=2/3,grid=5]", 33, "none", "numpy", 1),
            ("outlook[stride=2,grid=5]", 33, "lengths", "array_api_strict", 1),
            ("outlook[size=4,stride=3]", 23, "keys", "numpy", 1),
            ("outlook[size=3,stride=4/5,grid=7]", 60, "lengths", "numpy", 2000),
            ("outlook[size=3,stride=4/5,grid=7]", 60, "keys", "array_api_strict", 1),
        )
    ),
    *(
        row(expression, tokens, mask, t=t, **{WINDOWS: size})
        for expression, tokens, t, mask, size in (
            ("windowed[size=2/3,shift=1/2,grid=8,bias=true]", 61, None, "lengths", 1),
            ("windowed[size=2/3,shift=1/2,grid=8,bias=true]", 61, None, "keys", 700),
            ("windowed[size=4,shift=3,bias=true]", 23, 21, "none", 700),
            ("windowed[size=4,shift=3,bias=true]", 23, 21, "keys", 1),
            ("windowed[size=4,read=log_mean_exp]", 24, None, "none", 1),
            ("windowed[size=4,read=log_mean_exp]", 24, None, "lengths", 700),
        )
    ),
    # Segments are not computed as a batch if there is a bias of pairs: a block has the keys of its
    # segments, of which the first is not key 0.
    *(row(SYMMETRIC, 40, mask, n=4, **{DIRECT: 4}) for mask in ("none", "segments")),
    # LUCID's system of few tokens is solved in one block.
    *(
        row(f"lucid_solve[{option}]", 9, mask, n=3, library=library)
        for option, mask, library in (
            ("beta=true", "lengths", "numpy"),
            ("beta=true", "keys", "array_api_strict"),
            ("window=3", "segments", "numpy"),
            ("window=3", "none", "array_api_strict"),
        )
    ),
    *(
        row(f"preconditioned_key[learned={learned}]", s, mask)
        for s, mask, learned in (
            (1, "none", "true"),
            (KEY_CHUNK - 1, "keys", "false"),
            (KEY_CHUNK, "lengths", "true"),
            (KEY_CHUNK + 1, "segments", "false"),
            (5 * KEY_CHUNK + 3, "keys", "true"),
            (5 * KEY_CHUNK + 3, "segments", "true"),
        )
    ),
    row("preconditioned_key", 9 * KEY_CHUNK + 5, **{"sizes.ON_CPU.chunk_entries": 640}),
    *(
        row(f"atk{option}({base})", s, n=4)
        for option, base, s in (
            ("", "delta", CHUNK + 1),
            ("[learned=true]", "gated_delta", 2 * CHUNK),
            ("[center=40]", "kda", 3 * CHUNK + 17),
            ("[bound=1]", "gated_delta", CHUNK + 1),
            ("[learned=true]", "kda", 3 * CHUNK + 17),
        )
    ),
    row("atk(gated_delta)", 20 * CHUNK + 3, h=1, n=1),  # More keys than one block has.
    row("atk[learned=true](gated_delta)", 2 * CHUNK + 9, n=4, library="array_api_strict"),
)


@pytest.mark.parametrize("made", ROWS_OF_TABLE)
def test_output_and_gradients_are_those_of_the_definition(made, request, monkeypatch):
    expression, s, mask, t, h, n, library, small = made
    m = pa.parse(expression)
    layout = CallLayout("test", b=2, t=t, s=s, h=h, n=n, d=5, e=3)
    x = make_inputs(m, layout, "clustered")
    x = hard(m, x) if "g_atk" in x else x
    masks = masks_of(mask, s)
    if expression == SYMMETRIC:
        request.getfixturevalue("small_blocks")
    for where, size in small.items():
        monkeypatch.setattr(f"precondattn_portable.{where}", size)
    given = {name: array.copy() for name, array in x.items()}
    to = strict if library != "numpy" else dict
    given, masks_given = to(given), to(masks)
    expected, of_definition = m.vjp(**x, **masks, backend="reference")
    with monkeypatch.context() as patched:
        if expression.startswith("lucid_solve"):
            patched.setattr(lucid_solve.LucidSolveBlocks, "_view", None)
        forward = m(**given, **masks_given, backend="portable")
    out, pullback = m.vjp(**given, **masks_given, backend="portable")
    cotangent = np.random.default_rng(2).normal(size=out.shape)
    found = pullback(to({"d": cotangent})["d"])
    close(forward, expected)
    close(out, expected)
    for name, gradient in of_definition(cotangent).items():
        close(found[name], gradient, 1e-9)
        np.testing.assert_array_equal(np.asarray(given[name]), x[name])


def close(result, expected, bound=1e-10):
    result = np.asarray(result)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max(initial=0) <= bound * (np.abs(expected).max() + 1e-4)


def test_channels_of_atk_that_no_key_has_filled_with_a_small_eps():
    """e^{−c} ε underflows in float32."""
    m = pa.parse("atk[eps=1e-35,center=30](gated_delta)")
    s = 2 * CHUNK + 2
    x = make_inputs(m, CallLayout("x", t=s, s=s, h=3, n=3, d=8, e=6), "clustered")
    x = {name: array.astype(np.float32) for name, array in x.items()}
    x["k"][:, : CHUNK + 6] = 0
    x["k"][..., 2] = 0
    expected = m(**x, backend="reference")
    np.testing.assert_allclose(m(**x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", [4, 5, 7])
def test_pending_reflections_of_path_after_a_call_that_flushed_the_cached_keys(first):
    m = pa.parse("path[flush=4]")
    x = make_inputs(m, CallLayout("test", t=12, s=12), "random")
    cache, outs = m.init_cache(**x, capacity=12), []
    for start, stop in pairwise([0, *range(first, 13)]):
        out, cache = m.extend(cache, **slice_tokens(m, x, start, stop), backend="portable")
        outs.append(out)
    close(np.concat(outs, axis=1), m(**x, backend="reference"), 1e-12)


# ---- LASER of values that are far apart ----------------------------------------------------------

LEVELS = {
    "rising": (-900.0, -300.0, 300.0),
    "falling": (300.0, -300.0, -900.0),
    "all_negative": (-2500.0, -1200.0, -1900.0),
    "far_in_a_block_too": None,
}


@pytest.mark.parametrize(
    ("levels", "is_masked"), [(levels, i % 2 == 0) for i, levels in enumerate(LEVELS)]
)
def test_laser_of_values_too_far_apart_for_one_shift(levels, is_masked, small_blocks):
    """Values around a level for each block of 8 keys; scores outweigh the difference."""
    rng, at = np.random.default_rng(0), np.arange(24)
    q, k, v = (rng.normal(size=(2, 24, 2, width)) for width in (4, 4, 3))
    if LEVELS[levels] is None:  # The sum of the largest and the largest is within any range.
        level, (q[..., 0], k[..., 0]) = -1500.0 * (at % 3) - 1000, (60, 40 * (at % 3)[:, None])
    else:
        level = np.repeat(LEVELS[levels], 8)
        q[..., 0], k[..., 0] = 40, -level[:, None] / 20 * 0.9
    x = {"q": q, "k": k, "v": v + level[:, None, None]}
    masks = {"key_mask": at[None] >= np.asarray([[0], [11]])} if is_masked else {}
    expected, of_definition = pa.Laser().vjp(**x, **masks, backend="reference")
    out, pullback = pa.Laser().vjp(**x, **masks, backend="portable")
    cotangent = rng.normal(size=out.shape)
    found = pullback(cotangent)
    for name, gradient in (of_definition(cotangent) | {"out": expected}).items():
        close((found | {"out": out})[name], gradient, 1e-9)
