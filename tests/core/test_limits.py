"""Limits: how deep mechanisms nest, and how many the caches keep."""

import copy
import functools
import gc
import pickle
import sys
from dataclasses import dataclass

import numpy as np
import pytest

import precondattn as pa
from precondattn.execution import preparation
from precondattn.limits import NESTED
from tests.core.inputs import inputs_of


def nested(depth, preconditioner="elu1", base="linear"):
    return f"{preconditioner}(" * depth + base + ")" * depth


def test_the_deepest_composition_works():
    text = nested(NESTED)
    mechanism = pa.parse(text)
    assert str(mechanism) == text
    x = inputs_of(mechanism, t=5)
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-9, atol=1e-12)
    again = pickle.loads(pickle.dumps(mechanism))
    assert again == copy.deepcopy(mechanism) == mechanism
    assert hash(again) == hash(mechanism)


def test_what_nests_deeper_is_refused():
    for depth in (NESTED + 1, 10_000):
        with pytest.raises(ValueError, match=f"at most {NESTED} preconditioners") as caught:
            pa.parse(nested(depth))
        assert len(str(caught.value)) < 300
    mechanism = pa.parse(nested(NESTED))
    with pytest.raises(ValueError, match=f"elu1: at most {NESTED} preconditioners"):
        pa.Elu1(mechanism)


def test_an_option_may_be_named_depth():
    @dataclass(frozen=True)
    class Deep(pa.Softmax):  # No name, so it is not registered.
        depth: int = pa.options.count(NESTED + 1)

    assert pa.Elu1(Deep()).base.depth == NESTED + 1


def calls_of(function):
    """The number of Python functions that it calls."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_composition_is_at_most_quadratic_in_its_depth():
    def work(depth):
        mechanism = pa.parse(nested(depth, base="gla"))
        mechanism(**inputs_of(mechanism, t=3))

    work(11)  # What the first call imports.
    shallow, deep = calls_of(lambda: work(16)), calls_of(lambda: work(64))
    assert deep < 4**2 * shallow


def test_no_cache_of_mechanisms_and_signatures_grows_without_limit(monkeypatch):
    def unbounded():
        return {
            (wrapper.__module__, wrapper.__qualname__): wrapper.cache_info().currsize
            for wrapper in gc.get_objects()
            if type(wrapper) is functools._lru_cache_wrapper
            and (wrapper.__module__ or "").startswith("precondattn")
            and not wrapper.__module__.startswith("precondattn_conformance")
            and wrapper.cache_info().maxsize is None
        }

    def use(number):
        scaled = pa.Softmax(scale=1 + number / 1024)
        for mechanism in (pa.Lucid(pa.Laser(scaled)), pa.CCQ(pa.GLA(scale=1 + number / 1024))):
            x = inputs_of(mechanism, t=3)
            out, pullback = mechanism.vjp(**x)
            pullback(out)
            mechanism.extend(mechanism.init_cache(**x, capacity=4), **x)

    use(0)
    before = unbounded()
    monkeypatch.setattr(preparation, "KEPT_SIGNATURES", 4)
    preparation.prepared_calls.clear()
    for number in range(1, 9):
        use(number)
        assert len(preparation.prepared_calls) <= 4
    assert unbounded() == before


def test_long_text_is_refused_with_a_short_message():
    long = 100_000
    for text in (
        "lucid[eps=1" + " " * long + "]x",
        "x" * long,
        "lucid[" + "x" * long + "=1]",
        "softmax(" + "x" * long,
    ):
        with pytest.raises(ValueError, match=r"expected|unknown|no option|takes no base") as caught:
            pa.parse(text)
        assert len(str(caught.value)) < 1000
