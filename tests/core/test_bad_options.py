"""Options outside their range, and bases that make no sense, are refused at construction."""

import re

import numpy as np
import pytest

import precondattn as pa
from tests.core.bad_input import K, Q, V

SCALE = "softmax: option scale must be a finite number above 0, or None; found "
WINDOW = "softmax: option window must be a whole number, 1 or above, or None; found "
EPS = "option eps must be a finite number, 0 or above; found "
NORMALIZE = (
    "lucid: option normalize must be one of 'keys', 'queries_and_keys', 'rows', 'none'; found "
)
FLUSH = "path: option flush must be a whole number, 1 to 1073741824; found "
PAIRED = "option paired must be different names, such as q/k"
REFUSED = [
    *((pa.Softmax, {"scale": v}, f"{SCALE}{v!r}") for v in (0, -1, float("nan"), float("inf"), 1j)),
    (pa.LucidSolve, {"scale": True}, "lucid_solve: option scale must be a finite number above 0"),
    (pa.Lucid, {"scale": "1"}, "lucid: option scale must be a finite number above 0"),
    (pa.Softmax, {"scale": 10**400}, f"{SCALE}1000"),
    (pa.Softmax, {"scale": 10**5000}, f"{SCALE}a larger number"),
    (pa.Softmax, {"scale": "9" * 10_000}, f"{SCALE}'{'9' * 199}..."),
    *((pa.Softmax, {"window": v}, f"{WINDOW}{v!r}") for v in (0, 2.0, True, "3")),
    *((pa.Lucid, {"eps": v}, f"lucid: {EPS}{v!r}") for v in (-1e-9, float("nan"), None, False)),
    (pa.RMSNorm, {"eps": "0"}, f"rms_norm: {EPS}'0'"),
    (pa.QKNorm, {"eps": -1}, f"qk_norm: {EPS}-1"),
    (pa.lucid, {"q": Q, "k": K, "v": V, "eps": -1}, f"lucid: {EPS}-1"),
    (pa.Softmax, {"causal": 1}, "softmax: option causal must be true or false; found 1"),
    (pa.Softmax, {"bias": None}, "softmax: option bias must be true or false; found None"),
    (pa.RowNormalized, {"detach": 1}, "row_normalized: option detach must be true or false"),
    *((pa.Lucid, {"normalize": v}, f"{NORMALIZE}{v!r}") for v in ("row", None, [])),
    (
        *(pa.Softmax, {"read": "max"}),
        "softmax: option read must be one of mean, log_mean_exp, mean_and_log_sum; found 'max'",
    ),
    *(
        (pa.Lucid, {"normalize": v, **option}, f"lucid: {text.format(v)}")
        for v, option, text in (
            ("rows", {"beta": True}, "beta needs the unit diagonal, which normalize={!r} has not"),
            ("none", {"eps": 0}, "eps belongs to a norm; normalize={!r} has none"),
            ("keys", {"detach_max": True}, "detach_max belongs to normalize='rows'; found {!r}"),
        )
    ),
    *((pa.Path, {"flush": v}, f"{FLUSH}{v!r}") for v in (0, None, True, 2**30 + 1)),
    (pa.Path, {"forget": "yes"}, "path: option forget must be one of 'none', 'unscaled'"),
    (
        *(pa.Softmax, {"causal": False, "forget": "scaled"}),
        "softmax: a forget gate decays from the key to the query, forward in time, and needs "
        "causal=true; found forget='scaled' and causal=false",
    ),
    (pa.Differential, {"per": "batch"}, "differential: option per must be one of 'layer'"),
    *((pa.Differential, {"paired": v}, PAIRED) for v in ((), "q/q", "q/2", 3)),
    (pa.QKNorm, {"norm": "batch"}, "qk_norm: option norm must be one of 'rms', 'layer'"),
    (pa.RowNormalized, {"axis": "row"}, "row_normalized: option axis must be one of 'auto'"),
    (pa.LucidSolve, {"metric": "cosine"}, "option metric must be one of dot, transported"),
]
BETA = np.ones((2, 4, 2))
OF_SOFTMAX = (
    "options are causal, scale, window, bias, forget, read, softcap, sink, distance, buckets, "
    "max_distance, inputs q, k, v, and segment_ids, cu_seqlens, lengths, key_mask, prefix, "
    "attn_mask, backend"
)
REFUSED_TYPES = [
    *(
        (lambda base=base: pa.Lucid(base), f"lucid: base must be a mechanism; found {base!r}")
        for base in ("softmax", pa.Softmax)
    ),
    (lambda: pa.Softmax(windw=3), "softmax: unknown option 'windw' (did you mean 'window'?)"),
    (
        lambda: pa.softmax(Q, K, V, causl=False),
        f"softmax: unknown keyword 'causl' (did you mean 'causal'?); {OF_SOFTMAX}",
    ),
    (lambda: pa.lucid(Q, K, V, causal=False, window=2), "without causality, a window"),
    (lambda: pa.lucid(Q, K, V, beta=False, lucid_beta=BETA), "lucid_beta"),
    (lambda: pa.lucid(Q, K, V, lucid_beta=BETA, beta=False), "lucid_beta"),
]
PARSED = {
    "path[causal=false]": "path has no option 'causal'",
    "lucid_solve[metric=transported/0]": (
        "lucid_solve: option metric must be one of dot, transported, transported/2"
    ),
    "differential[paired=q/w]": "paired names w, and the base takes q, k, v",
    "row_normalized[axis=channel]": "the norm of a channel runs over all tokens",
    "lucid[normalize=queries_and_keys](qk_norm)": "normalises what reaches the base",
    "temperature(lucid[normalize=queries_and_keys])": "divides out what temperature does",
    "qk_norm(row_normalized(differential))": "the first of two maps only, not q2, k2",
    "temperature(laser(temperature))": "tau is an input of laser(temperature) already",
}


@pytest.mark.parametrize(("build", "options", "text"), REFUSED)
def test_an_option_out_of_its_range_is_refused(build, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build(**options)


@pytest.mark.parametrize(("build", "text"), REFUSED_TYPES)
def test_a_base_and_a_keyword_that_are_none_are_refused(build, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        build()


@pytest.mark.parametrize("text", PARSED)
def test_an_expression_is_refused_with_the_reason(text):
    is_option = "option" in PARSED[text]
    words = ("" if is_option else "makes no sense.*") + re.escape(PARSED[text])
    with pytest.raises(ValueError if is_option else TypeError, match=words):
        pa.parse(text)
