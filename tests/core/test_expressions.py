"""Expressions, mechanisms as immutable objects, their programs, and the limits of all these.

`str` and `parse` are inverse. A mechanism that makes no sense is refused at construction, with the
reason.
"""

import copy
import dataclasses
import functools
import gc
import pickle
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.options import fields_of
from precondattn.execution import preparation
from precondattn.limits import NESTED
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_conformance.declared import expressions
from tests.core.inputs import inputs_of

scales = st.none() | st.floats(0, exclude_min=True, allow_infinity=False)
epsilons = st.floats(0, allow_infinity=False)
windows = st.none() | st.integers(1, 10**12)


@st.composite
def softmaxes(draw, causal=None, read=None):
    return pa.Softmax(
        causal=draw(st.booleans()) if causal is None else causal,
        scale=draw(scales),
        window=draw(windows),
        bias=draw(st.booleans()),
        read=draw(st.sampled_from([MEAN, LOG_MEAN_EXP])) if read is None else read,
    )


def lasers(causal=None):
    return st.builds(pa.Laser, softmaxes(causal=causal, read=MEAN))


@st.composite
def lucids(draw):
    base = draw(softmaxes(causal=True) | lasers(causal=True))
    normalize = draw(st.sampled_from(["keys", "queries_and_keys", "rows", "none"]))
    own = {"scale": draw(scales)}
    if normalize in ("keys", "queries_and_keys"):
        own |= {"eps": draw(epsilons), "beta": draw(st.booleans())}
    if normalize == "rows":
        own |= {"detach_max": draw(st.booleans())}
    return pa.Lucid(base, normalize=normalize, **own)


def assert_refused(text, error, message):
    with pytest.raises(error, match=re.escape(message)):
        pa.parse(text)


@given(softmaxes() | lasers() | lucids())
def test_parse_is_the_inverse_of_str_which_has_the_options_that_differ_from_the_default(mechanism):
    text = str(mechanism)
    again = pa.parse(text)
    assert again == mechanism
    assert hash(again) == hash(mechanism)
    assert str(again) == text
    assert again.program == mechanism.program
    own = text.partition("(")[0]
    differing = [n for n, f in fields_of(mechanism).items() if getattr(mechanism, n) != f.default]
    assert re.findall(r"(\w+)=", own) == differing
    assert ("[" in own) == bool(differing)
    base = getattr(mechanism, "base", pa.Softmax())
    assert ("(" in text) == (base != pa.Softmax())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (pa.Softmax(window=np.int64(7), scale=0.1), "softmax[scale=0.1,window=7]"),
        (pa.Softmax(scale=2), "softmax[scale=2]"),
        (pa.Softmax(scale=1e-300), "softmax[scale=1e-300]"),
        (pa.Softmax(scale=np.float32(0.5)), "softmax[scale=0.5]"),
        (pa.Softmax(read=LOG_MEAN_EXP), "softmax[read=log_mean_exp]"),
        (pa.Lucid(pa.Softmax(causal=True), eps=1e-6), "lucid"),
        (pa.Lucid(eps=-0.0), "lucid[eps=0]"),
        (pa.Lucid(pa.Laser(pa.Softmax(window=3)), eps=0), "lucid[eps=0](laser(softmax[window=3]))"),
        (pa.Lucid(normalize="rows", detach_max=True), "lucid[normalize=rows,detach_max=true]"),
        (" lucid [ eps = 0 , beta = true ] ( laser ) ", "lucid[eps=0,beta=true](laser)"),
        ("lucid[beta=true,eps=0.0]", "lucid[eps=0,beta=true]"),
        ("lucid[eps=1e-6](softmax[causal=true])", "lucid"),
        ("softmax[scale=none,window=none,read=mean]", "softmax"),
        ("lucid\n(softmax [window=3])", "lucid(softmax[window=3])"),
    ],
)
def test_the_text_is_canonical(given, text):
    mechanism = pa.parse(given) if isinstance(given, str) else given
    assert str(mechanism) == text
    assert mechanism == pa.parse(text)


EPS = "lucid: option eps must be a finite number, 0 or above; found"
SCALE = "softmax: option scale must be a finite number above 0, or None"
WINDOW = "option window must be a whole number, 1 or above, or None; found"
PLACES = {
    "": ("the name of a mechanism", 0),
    "lucid()": ("the name of a mechanism", 6),
    "lucid[,eps=0]": ("the name of an option", 6),
    "lucid[eps]": ("'=' and the value of eps", 9),
    "lucid[eps=]": ("the value of eps", 10),
    "lucid[eps=0": ("']' (a bracket is missing)", 11),
    "lucid[eps=0(laser)": ("',' or ']'", 11),
    "lucid(laser": ("')'", 11),
    "lucid(laser))": ("the end of the expression", 12),
    "lucid[eps=0][beta=true]": ("the end of the expression", 12),
}
"""What is expected in place of what is at a position"""


@pytest.mark.parametrize("text", PLACES)
def test_invalid_text_is_refused_with_its_position(text):
    expected, place = PLACES[text]
    assert_refused(text, ValueError, f"expected {expected} here:\n  {text}\n  {' ' * place}^")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lucd", "'lucd': unknown mechanism 'lucd' (did you mean 'lucid'?); known are atk, b"),
        ("xyz", "'xyz': unknown mechanism 'xyz'; known are atk, bidirectional, ccq, channel, com"),
        (
            "lucid[epz=0]",
            "lucid has no option 'epz' (did you mean 'eps'?); it has normalize, scale",
        ),
        ("laser[scale=1]", "'laser[scale=1]': laser has no option 'scale' (it belongs to the base"),
        ("lucid[base=softmax]", "lucid has no option 'base'; it has normalize, scale, eps"),
        ("lucid[eps=0,eps=1]", "'lucid[eps=0,eps=1]': option eps is given twice"),
        ("lucid[eps=-1]", f"{EPS} -1.0"),
        ("lucid[eps=abc]", f"{EPS} 'abc'"),
        ("softmax[scale=nan]", SCALE),
        ("softmax[causal=1]", "softmax: option causal must be true or false; found '1'"),
        ("softmax[window=1.5]", WINDOW),
        (
            "softmax[read=max]",
            "read must be one of mean, log_mean_exp, mean_and_log_sum; found 'max'",
        ),
        ("lucid[normalize=row]", "'queries_and_keys', 'rows', 'none'; found 'row'"),
        ("softmax(lucid)", "softmax is a base and takes no base"),
        ("rms_norm(softmax)", "'rms_norm(softmax)': rms_norm is a piece and takes no base"),
    ],
)
def test_invalid_text_is_refused_with_the_name(text, message):
    assert_refused(text, ValueError, message)
    for other in (None, b"lucid"):
        words = f"an expression is text such as 'lucid(laser)'; found {other!r}"
        assert_refused(other, TypeError, words)


INDEFINITE = (
    "without causality, a window makes the matrix of lucid indefinite, which has no bound and may "
    "have no inverse"
)
USED = "lucid needs a base that exponentiates a score function, and one that no other"
NO_MEAN = (
    "laser needs a base that reads a mean of its values, under non-negative weights that sum to one"
)


@pytest.mark.parametrize(
    ("outer", "base", "reason"),
    [
        ("lucid", "softmax[causal=false,window=4]", INDEFINITE),
        ("lucid", "lucid(laser)", USED),
        ("lucid", "rms_norm", USED),
        ("laser", "lucid(laser)", NO_MEAN),
        ("laser", "softmax[read=log_mean_exp]", NO_MEAN),
        ("laser", "rms_norm", NO_MEAN),
    ],
)
def test_a_composition_that_makes_no_sense_is_refused_with_the_reason(outer, base, reason):
    text = f"{outer}({base})"
    message = f"{text} makes no sense: {reason}"
    assert_refused(text, TypeError, message)
    cls, inner = registry.registered()[outer], pa.parse(base)
    with pytest.raises(TypeError, match=re.escape(message)):
        cls(inner)


def test_equal_mechanisms_are_equal_and_hash_alike_and_others_have_other_programs():
    for text in expressions():
        mechanism, other = pa.parse(text), pa.parse(text)
        copy = pickle.loads(pickle.dumps(mechanism))
        for each in (other, copy, dataclasses.replace(mechanism)):
            assert each == mechanism, text
            assert hash(each) == hash(mechanism), text
            assert str(each) == text
        assert copy.inputs == mechanism.inputs, text
        assert copy.program == mechanism.program, text
    every = [pa.parse(text) for text in expressions()]
    assert len({*every}) == len({m.program for m in every}) == len(every)


def test_no_field_of_a_mechanism_can_be_set():
    for mechanism in map(pa.parse, registry.registered()):
        for name in (*(field.name for field in dataclasses.fields(mechanism)), "other"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(mechanism, name, getattr(mechanism, name, 1))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("lucid(laser)", "lucid(softmax[read=log_mean_exp])"),
        ("laser(softmax[window=3])", "softmax[window=3,read=log_mean_exp]"),
        ("lucid(softmax[scale=0.3])", "lucid[scale=0.3](softmax[scale=0.3])"),
    ],
)
def test_equivalent_mechanisms_have_equal_programs(text, other):
    one, two = pa.parse(text), pa.parse(other)
    assert one != two
    assert one.program == two.program
    assert hash(one.program) == hash(two.program)
    assert str(one.program) == str(two.program)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 3))
    np.testing.assert_array_equal(one(q, k, v), two(q, k, v))
    cache = one.init_cache(q, k, v, capacity=8)
    np.testing.assert_array_equal(two.extend(cache, q, k, v)[0], one.extend(cache, q, k, v)[0])


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

    @dataclass(frozen=True)
    class Deep(pa.Softmax):  # No name, so it is not registered.
        depth: int = pa.options.count(NESTED + 1)

    assert pa.Elu1(Deep()).base.depth == NESTED + 1  # An option may be named so.


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
