"""Options outside their range are refused at construction."""

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
            for cls in (pa.Softmax, pa.Lucid, pa.LucidSolve)
            for value in (0, 0.0, -1, float("nan"), float("inf"), -float("inf"), True, "1", 1j)
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
            for cls in (pa.Lucid, pa.LucidSolve, pa.RMSNorm)
            for v in (-1e-9, float("nan"), float("inf"), None, False, "0")
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
