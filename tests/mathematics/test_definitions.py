"""Every mechanism against its definition: outputs and gradients, with masks and states.

`definitions.py` shares no code with the library. Everything is float64 and has to hold to 1e-10 of
the largest number involved. A gradient is compared along a random direction of each input, which
every entry changes, with the complex step of the definition, which rounds nothing off.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from tests.mathematics.definitions import (
    assert_gradients,
    assert_is_defined,
    close,
    definition,
)

OTHERS = (
    "softmax[softcap=2,sink=true,bias=true]",
    "softmax[softcap=0.7,sink=true,window=4]",
    "softmax[softcap=2,sink=true,causal=false]",
    "softmax[softcap=2,sink=true,forget=unscaled]",
    "softmax[forget=scaled,scale=0.3]",
    "softmax[distance=slopes,causal=false,softcap=2]",
    "softmax[distance=slopes,forget=unscaled,bias=true]",
    "softmax[distance=buckets,buckets=4,max_distance=5,window=6,sink=true]",
    "path[forget=scaled,window=3,scale=0.7]",
    "path[bias=true,forget=unscaled]",
    "laser(path[flush=3])",
    "lucid[beta=true,eps=0.5,scale=0.8](softmax[window=3,scale=0.6])",
    "lucid[normalize=rows](softmax[window=3])",
    "lucid[normalize=none,scale=0.4](softmax[window=3])",
    "lucid[normalize=queries_and_keys](softmax[window=3])",
    "lucid[normalize=rows](qk_norm)",
    "lucid[normalize=none](qk_norm[gain=true])",
    "lucid[normalize=rows](temperature)",
    "lucid(temperature[per=head])",
    "qk_norm[norm=layer,gain=true](lucid)",
    "lucid(laser(path))",
    "lucid[scale=0.8,beta=true,eps=0.5](path[window=3,forget=scaled,scale=0.6])",
    "lucid[normalize=queries_and_keys](path[forget=unscaled])",
    "lucid[normalize=rows](path)",
    "lucid[normalize=none](path)",
    "lucid(per_dim_scale(path))",
    "qk_norm[gain=true](lucid(path))",
    "temperature[per=head](path)",
    "laser(temperature[per=head])",
    "temperature(laser(per_dim_scale))",
    "per_dim_scale(temperature[per=head])",
    "qk_norm[norm=layer,gain=true](softmax[window=3])",
    "qk_norm[norm=layer,eps=0.1](laser)",
    "qk_norm[gain=true](temperature)",
    "temperature(softmax[bias=true,scale=0.7])",
    "differential[paired=q](lucid)",
    "differential[paired=k]",
    "differential[per=token](lucid(laser))",
    "differential(lucid(path))",
    "differential[paired=q/k/tau](temperature)",
    "differential[per=token,paired=q/k/w/beta](path)",
    "differential[per=head](row_normalized)",
    "differential[paired=logits](outlook[size=3])",
    "row_normalized[eps=0.5](lucid(laser))",
    "row_normalized[detach=false](differential[per=token])",
    "row_normalized(differential(row_normalized))",
    "lucid(row_normalized[detach=false])",
    "row_normalized[axis=token](cross_covariance)",
    "row_normalized[axis=channel,detach=false](channel)",
    "mlstm[eps=0.1]",
    "elu1(linear[normalize=true,eps=0.1])",
    "hedgehog(linear[scale=0.7,normalize=true])",
    "hedgehog[factor=2,per=head](gated_delta)",
    "qk_norm[norm=l2,eps=0.1](gated_delta)",
    "atk[learned=true](kda)",
    "atk(comba[erases=decayed])",
    "atk[bound=2,eps=0.01,center=0.5]",
    "atk[bound=1]",
    "stable_step[rule=exact](delta)",
    "ccq(softmax[window=3])",
    "ccq[covariance=decayed](ssd)",
    "ccq[covariance=decayed](softmax[forget=unscaled])",
    "ccq[covariance=decayed](path[forget=unscaled])",
    "ccq[covariance=decayed](hedgehog(gla))",
    "ccq[covariance=decayed,backbone_key=unit,eps=0.1](gla)",
    "ccq[covariance=query_weighted,tau=0.3](delta)",
    "ccq[covariance=query_weighted,eps=0.1]",
    "hedgehog(ccq(gla))",
    "bidirectional(comba[erases=decayed])",
    "bidirectional(gla[scale=0.3])",
    "nystrom[landmarks=9,iterations=3,skip=true]",
)
"""Options and compositions beside the declared ones."""
WHOLE = [text for text in expressions() if pa.parse(text).role != "piece" and "log_sum" not in text]
EVERY = [*OTHERS, *WHOLE]
SIZES = {"b": 2, "h": 4, "n": 2, "d": 3, "e": 2, "m": 3}
T = 8
MASKS = {
    "lengths": np.asarray([T, 6]),
    "key_mask": np.asarray([[0, 1, 1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 1, 1, 1]], dtype=bool),
    "segment_ids": np.asarray([[0, 0, 0, 0, 0, 1, 1, 1], [3, 3, 5, 5, 5, 5, 5, 5]]),
}


def inputs_of(m, kind, t, **sizes):
    sizes = SIZES | sizes
    if "covariance=decayed" in str(m):
        sizes["values_per_head"] = 1
    return make_inputs(m, CallLayout("definition", t=t, s=T, **sizes), kind)


def has_states(m):
    """Whether all buffers of its cache are sums over tokens, which can be continued."""
    slots = m.program.slots.values() if m.offers.causal else ()
    return bool(slots) and not any("c" in slot.pattern.split() for slot, _ in slots)


def fewest(m):
    """As many queries as keys, unless the mechanism has them of other tokens."""
    letters = {letter for pattern in m.inputs.values() for letter in pattern.letters}
    return T - 3 if {"t", "s"} <= letters and m.offers.causal else T


@pytest.mark.parametrize("text", EVERY)
def test_output_and_gradients_are_those_of_the_definition(text):
    m = pa.parse(text)
    assert_is_defined(m, inputs_of(m, "clustered", fewest(m)))


@pytest.mark.parametrize("text", EVERY)
def test_masks_take_keys_out_of_the_definition(text):
    m = pa.parse(text)
    # The slope of a norm without ε has no limit at a zero key.
    kind = "duplicate" if "eps=0]" in text else "zero"
    assert_is_defined(m, inputs_of(m, kind, T), **MASKS)


STATES = [t for t in EVERY if "differential" not in t and has_states(pa.parse(t))]


@pytest.mark.parametrize("text", STATES)
def test_states_continue_and_their_gradients_are_those_of_the_definition(text):
    """The cache holds three tokens, with keys that are masked among those that follow."""
    m = pa.parse(text)
    x = inputs_of(m, "duplicate", T)
    start, more = slice_tokens(m, x, 0, 3), slice_tokens(m, x, 3, T)
    _, cache = m.extend(m.init_cache(**start), **start)
    for masks in ({}, {"key_mask": MASKS["key_mask"][:, 3:], "lengths": np.asarray([5, 3])}):
        out, longer, pullback = m.extend_vjp(cache, **more, **masks)
        states = {name: np.array(array) for name, array in cache.store.items()}
        expected, last = definition(m, more, states, **masks)
        close(out, expected.real)
        rng = np.random.default_rng(0)
        d_out, d_last = rng.normal(size=out.shape), {}
        for name, array in longer.store.items():
            close(array, last[name].real)
            d_last[name] = rng.normal(size=array.shape)
        d_out = d_out * np.any(expected != 0, axis=-1, keepdims=True)
        gradients, d_states = pullback(d_out, d_last)
        assert (gradients.keys(), d_states.keys()) == (more.keys(), states.keys())
        assert_gradients(m, more, gradients | d_states, d_out, states, d_last, **masks)
