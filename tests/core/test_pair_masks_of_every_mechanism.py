"""No mechanism ignores a mask of pairs: it has it, or says in one sentence why not."""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("masked", b=1, t=6, s=6)
COMPOSITIONS = ("lucid(laser)", "ccq(lucid)", "bidirectional(gated_delta)", "temperature(laser)")
TEXTS = sorted(
    {*pa.mechanisms(), *COMPOSITIONS}.union(*(c.variants for c in registry.registered().values()))
)
MASKS = {"prefix": np.array([6]), "attn_mask": np.eye(6, dtype=bool)[None, None]}


def reason(m, name):
    """Why a mechanism takes no such mask; None where it does."""
    try:
        m(**make_inputs(m, LAYOUT, "random"), **{name: MASKS[name]})
    except ValueError as error:
        message = str(error)
    else:
        return None
    before = f"{m} takes no {name}: "
    assert message.startswith(before), message
    return message.removeprefix(before)


def changed(m, x, token):
    """The inputs with another token."""
    other = make_inputs(m, LAYOUT, "random", seed=1)
    for name, pattern in m.inputs.items():
        x = {**x, name: x[name].copy()}
        for axis, letter in enumerate(pattern.letters):
            if letter in "ts" and x[name].shape[axis] == LAYOUT.t:
                at = (*[slice(None)] * axis, token)
                x[name][at] = other[name][at]
    return x


@pytest.mark.parametrize("text", TEXTS)
def test_a_mechanism_has_masks_of_pairs_or_says_why_not(text):
    m = pa.parse(text)
    relates_tokens = any(leaf.relates_tokens for leaf in m.program.leaves)
    x = make_inputs(m, LAYOUT, "random")
    for name, mask in MASKS.items():
        why = reason(m, name)
        if why is not None:
            assert len(why.split()) >= 6
            assert not re.search(r"\. |\n", why)
        elif name == "attn_mask":  # Each query may attend only to itself.
            out, other = (m(**inputs, attn_mask=mask) for inputs in (x, changed(m, x, 3)))
            # A shift of LASER's exponents is of all tokens, and rounds.
            alone, same = (np.delete(a, 3, axis=1) for a in (out, other))
            np.testing.assert_allclose(alone, same, rtol=0, atol=1e-14)
            assert np.abs(out[:, 3] - other[:, 3]).max() > 1e-3
        elif relates_tokens:  # The first token sees the last one.
            out, other = (m(**inputs, prefix=mask) for inputs in (x, changed(m, x, 5)))
            assert np.abs(out[:, 0] - other[:, 0]).max() > 1e-3
            np.testing.assert_allclose(m(**x, prefix=[0]), m(**x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("text", TEXTS)
def test_first_and_last_keys_that_no_query_sees(text):
    m = pa.parse(text)
    if reason(m, "attn_mask") is None:
        x, mask = make_inputs(m, LAYOUT, "random"), np.arange(6) % 5 > 0
        given = {**x, "attn_mask": np.broadcast_to(mask, (1, 1, 6, 6))}
        (out, pull), (expected, definition) = m.vjp(**given), m.vjp(**given, backend="reference")
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
        for name, gradient in definition(expected).items():
            np.testing.assert_allclose(pull(expected)[name], gradient, rtol=0, atol=1e-11)


def test_those_that_have_them_are_softmax_and_what_is_around_it():
    having = {text for text in TEXTS if reason(pa.parse(text), "attn_mask") is None}
    relating = {
        text
        for text in having
        if any(leaf.relates_tokens for leaf in pa.parse(text).program.leaves)
    }
    for text in relating:
        leaves = [leaf.name for leaf in pa.parse(text).program.leaves if leaf.relates_tokens]
        assert {*leaves} == {"softmax"}, text
    assert {"softmax", "laser", "differential", "qk_norm", "temperature"} <= relating
    refusing = {"lucid", "symmetric_lucid", "path", "ccq", "mlstm", "gsa", "gated_delta", "linear"}
    assert not refusing & having
