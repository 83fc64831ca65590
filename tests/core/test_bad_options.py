"""Options outside their range are refused at construction."""

import re
from functools import partial

import numpy as np
import pytest

import precondattn as pa
from tests.core.bad_input import K, Q, V, case, refuses

SCALE = "option scale must be a finite number above 0, or None; found "


WINDOW = "option window must be a whole number, 1 or above, or None; found "


EPS = "option eps must be a finite number, 0 or above; found "


NORMALIZE = (
    "lucid: option normalize must be one of 'keys', 'queries_and_keys', 'rows', 'none'; found "
)


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        *(
            case(f"{cls.name} scale {value!r}", f"{cls.name}: {SCALE}{value!r}", partial(cls, **o))
            for cls, value in (
                *((pa.Softmax, value) for value in (0, 0.0, -1, float("nan"), float("inf"), 1j)),
                *((pa.Lucid, -1), (pa.LucidSolve, True), (pa.Lucid, "1"), (pa.LucidSolve, 0)),
            )
            for o in [{"scale": value}]
        ),
        case(
            "scale beyond floats",
            f"softmax: {SCALE}1000",
            lambda: pa.Softmax(scale=10**400),
        ),
        case(
            "scale with more digits than Python prints",
            f"softmax: {SCALE}a larger number",
            lambda: pa.Softmax(scale=10**5000),
        ),
        case(
            "flush above every sequence",
            "path: option flush must be a whole number, 1 to 1073741824; found 1073741825",
            lambda: pa.Path(flush=2**30 + 1),
        ),
        case(
            "a setting of many characters",
            f"softmax: {SCALE}'{'9' * 199}...",
            lambda: pa.Softmax(scale="9" * 10_000),
        ),
        *(
            case(f"window {v!r}", f"softmax: {WINDOW}{v!r}", partial(pa.Softmax, window=v))
            for v in (0, -1, 1.5, 2.0, True, "3")
        ),
        *(
            case(f"eps {v!r}", f"{cls.name}: {EPS}{v!r}", partial(cls, eps=v))
            for cls, v in (
                *((pa.Lucid, v) for v in (-1e-9, float("nan"), float("inf"), None)),
                *((pa.LucidSolve, False), (pa.LucidSolve, -1e-9), (pa.RMSNorm, "0")),
                (pa.RMSNorm, -1e-9),
            )
        ),
        *(
            case(
                f"{name} {v!r}",
                f"softmax: option {name} must be true or false; found {v!r}",
                partial(pa.Softmax, **{name: v}),
            )
            for name in ("causal", "bias")
            for v in (1, 0, None, "true")
        ),
        case(
            "beta 1",
            "lucid: option beta must be true or false; found 1",
            lambda: pa.Lucid(beta=1),
        ),
        *(
            case(f"normalize {v!r}", f"{NORMALIZE}{v!r}", partial(pa.Lucid, normalize=v))
            for v in ("row", "given", None, True, [])
        ),
        case(
            "read of no name",
            "softmax: option read must be one of mean, log_mean_exp, mean_and_log_sum; found 'max'",
            lambda: pa.Softmax(read="max"),
        ),
        *(
            case(
                f"base {v!r}",
                f"lucid: base must be a mechanism; found {v!r}",
                partial(pa.Lucid, v),
                TypeError,
            )
            for v in ("softmax", None, pa.Softmax)
        ),
        *(
            case(
                f"beta with {v}",
                f"lucid: beta needs the unit diagonal, which normalize={v!r} has not",
                partial(pa.Lucid, beta=True, normalize=v),
            )
            for v in ("rows", "none")
        ),
        *(
            case(
                f"eps with {v}",
                f"lucid: eps belongs to a norm; normalize={v!r} has none",
                partial(pa.Lucid, eps=0, normalize=v),
            )
            for v in ("rows", "none")
        ),
        *(
            case(
                f"detach_max with {v}",
                f"lucid: detach_max belongs to normalize='rows'; found {v!r}",
                partial(pa.Lucid, detach_max=True, normalize=v),
            )
            for v in ("keys", "queries_and_keys", "none")
        ),
        case(
            "unknown option",
            "softmax: unknown option 'windw' (did you mean 'window'?)",
            lambda: pa.Softmax(windw=3),
            TypeError,
        ),
        case(
            "unknown option of a shorthand",
            "softmax: unknown keyword 'causl' (did you mean 'causal'?); options are causal, scale, "
            "window, bias, forget, read, softcap, sink, distance, buckets, max_distance, inputs q, "
            "k, v, and segment_ids, cu_seqlens, lengths, key_mask, prefix, attn_mask, backend",
            lambda: pa.softmax(Q, K, V, causl=False),
            TypeError,
        ),
        case(
            "bad option of a shorthand",
            f"lucid: {EPS}-1",
            lambda: pa.lucid(Q, K, V, eps=-1),
        ),
        case(
            "base of a shorthand",
            "without causality, a window",
            lambda: pa.lucid(Q, K, V, causal=False, window=2),
            TypeError,
        ),
    ],
)
def test_an_option_out_of_its_range_is_refused_at_construction(run, error, text):
    refuses(run, error, text)


@pytest.mark.parametrize("order", [("beta", "lucid_beta"), ("lucid_beta", "beta")])
def test_a_shorthand_refuses_an_input_whose_option_is_switched_off_in_either_order(order):
    given = {"beta": False, "lucid_beta": np.ones((2, 4, 2))}
    with pytest.raises(TypeError, match="lucid_beta"):
        pa.lucid(Q, K, V, **{name: given[name] for name in order})


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: pa.Path(flush=0),
            "path: option flush must be a whole number, 1 to 1073741824; found 0",
        ),
        (lambda: pa.Path(flush=None), "path: option flush must be a whole number"),
        (lambda: pa.Path(flush=True), "path: option flush must be a whole number"),
        (lambda: pa.Path(forget="yes"), "path: option forget must be one of 'none', 'unscaled'"),
        (lambda: pa.parse("path[causal=false]"), "path has no option 'causal'"),
        (
            lambda: pa.Softmax(causal=False, forget="scaled"),
            "softmax: a forget gate decays from the key to the query, forward in time, and needs "
            "causal=true; found forget='scaled' and causal=false",
        ),
        (lambda: pa.Differential(per="batch"), "differential: option per must be one of 'layer'"),
        (lambda: pa.Differential(paired=()), "option paired must be different names, such as q/k"),
        (lambda: pa.Differential(paired="q/q"), "option paired must be different names"),
        (lambda: pa.Differential(paired="q/2"), "option paired must be different names"),
        (lambda: pa.Differential(paired=3), "option paired must be different names"),
        (lambda: pa.Temperature(per="token"), "temperature: option per must be one of 'layer'"),
        (lambda: pa.QKNorm(norm="batch"), "qk_norm: option norm must be one of 'rms', 'layer'"),
        (lambda: pa.QKNorm(eps=-1), "qk_norm: option eps must be a finite number, 0 or above"),
        (lambda: pa.RowNormalized(axis="row"), "row_normalized: option axis must be one of 'auto'"),
        (lambda: pa.RowNormalized(detach=1), "row_normalized: option detach must be true or false"),
        (
            lambda: pa.parse("lucid_solve[metric=transported/0]"),
            "lucid_solve: option metric must be one of dot, transported, transported/2",
        ),
        (lambda: pa.LucidSolve(metric="cosine"), "option metric must be one of dot, transported"),
    ],
)
def test_an_option_of_a_preconditioner_or_of_path_out_of_its_range_is_refused(build, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("differential[paired=q/w]", "paired names w, and the base takes q, k, v"),
        ("row_normalized[axis=channel]", "the norm of a channel runs over all tokens"),
        ("lucid[normalize=queries_and_keys](qk_norm)", "normalises what reaches the base"),
        ("temperature(lucid[normalize=queries_and_keys])", "divides out what temperature does"),
        ("qk_norm(row_normalized(differential))", "the first of two maps only, not q2, k2"),
        ("temperature(laser(temperature))", "tau is an input of laser(temperature) already"),
    ],
)
def test_an_incompatible_base_is_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match="makes no sense.*" + re.escape(reason)):
        pa.parse(text)
