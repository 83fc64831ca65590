"""Expressions, mechanisms as immutable objects, and their programs.

`str` and `parse` are inverse. A mechanism that makes no sense is refused at construction, with the
reason.
"""

import dataclasses
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.options import fields_of
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_conformance.declared import expressions

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
    ("mechanism", "text"),
    [
        (pa.Softmax(), "softmax"),
        (pa.Softmax(causal=False), "softmax[causal=false]"),
        (pa.Softmax(scale=2), "softmax[scale=2]"),
        (pa.Softmax(scale=0.1, window=7), "softmax[scale=0.1,window=7]"),
        (pa.Softmax(window=7, scale=0.1), "softmax[scale=0.1,window=7]"),
        (pa.Softmax(scale=1e-300), "softmax[scale=1e-300]"),
        (pa.Softmax(scale=np.float32(0.5)), "softmax[scale=0.5]"),
        (pa.Softmax(read=LOG_MEAN_EXP), "softmax[read=log_mean_exp]"),
        (pa.Lucid(), "lucid"),
        (pa.Lucid(pa.Softmax(causal=True), eps=1e-6), "lucid"),
        (pa.Lucid(eps=0), "lucid[eps=0]"),
        (pa.Lucid(eps=0.0), "lucid[eps=0]"),
        (pa.Lucid(pa.Laser(), eps=0), "lucid[eps=0](laser)"),
        (pa.Lucid(pa.Laser(pa.Softmax(window=3))), "lucid(laser(softmax[window=3]))"),
        (pa.Lucid(normalize="rows", detach_max=True), "lucid[normalize=rows,detach_max=true]"),
    ],
    ids=str,
)
def test_the_text_is_canonical(mechanism, text):
    assert str(mechanism) == text


def test_equal_mechanisms_have_one_text_even_for_a_negative_zero():
    assert pa.Lucid(eps=-0.0) == pa.Lucid(eps=0.0)
    assert str(pa.Lucid(eps=-0.0)) == "lucid[eps=0]"
    assert pa.Softmax(window=np.int64(3)) == pa.Softmax(window=3)
    assert math.copysign(1.0, pa.Lucid(eps=-0.0).eps) == 1.0


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" lucid [ eps = 0 , beta = true ] ( laser ) ", "lucid[eps=0,beta=true](laser)"),
        ("lucid[beta=true,eps=0.0]", "lucid[eps=0,beta=true]"),
        ("lucid[eps=1e-6](softmax[causal=true])", "lucid"),
        ("softmax[scale=none,window=none,read=mean]", "softmax"),
        ("lucid\n(softmax [window=3])", "lucid(softmax[window=3])"),
    ],
)
def test_spaces_order_and_defaults_make_no_difference(text, canonical):
    assert str(pa.parse(text)) == canonical


EPS = "lucid: option eps must be a finite number, 0 or above; found"
SCALE = "softmax: option scale must be a finite number above 0, or None"
WINDOW = "option window must be a whole number, 1 or above, or None; found"
PLACES = {
    "": ("the name of a mechanism", 0),
    "3": ("the name of a mechanism", 0),
    "lucid()": ("the name of a mechanism", 6),
    "lucid[,eps=0]": ("the name of an option", 6),
    "lucid[eps]": ("'=' and the value of eps", 9),
    "lucid[eps=]": ("the value of eps", 10),
    "lucid[eps=0": ("']' (a bracket is missing)", 11),
    "lucid[eps=0(laser)": ("',' or ']'", 11),
    "lucid(laser": ("')'", 11),
    "lucid x": ("the end of the expression", 6),
    "lucid)": ("the end of the expression", 5),
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
        ("lucid(sofmax)", "unknown mechanism 'sofmax' (did you mean 'softmax'?)"),
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
        ("lucid[eps=none]", f"{EPS} 'none'"),
        ("lucid[eps=1e400]", f"{EPS} inf"),
        ("softmax[scale=nan]", SCALE),
        ("softmax[scale=0]", SCALE),
        ("softmax[causal=1]", "softmax: option causal must be true or false; found '1'"),
        ("softmax[causal=False]", "softmax: option causal must be true or false; found 'False'"),
        ("softmax[window=1.5]", WINDOW),
        ("softmax[window=0]", f"{WINDOW} 0"),
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


@pytest.mark.parametrize("text", [None, 3, b"lucid", ["lucid"], pa.Lucid])
def test_only_text_is_an_expression(text):
    assert_refused(text, TypeError, f"an expression is text such as 'lucid(laser)'; found {text!r}")


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
        ("lucid", "laser(softmax[causal=false,window=4])", INDEFINITE),
        ("lucid", "lucid", USED),
        ("lucid", "lucid(laser)", USED),
        ("lucid", "rms_norm", USED),
        ("lucid", "lucid_solve", USED),
        ("laser", "lucid", NO_MEAN),
        ("laser", "laser", NO_MEAN),
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


def test_equal_mechanisms_are_equal_and_hash_alike():
    for text in expressions():
        mechanism, other = pa.parse(text), pa.parse(text)
        copy = pickle.loads(pickle.dumps(mechanism))
        for each in (other, copy, dataclasses.replace(mechanism)):
            assert each == mechanism, text
            assert hash(each) == hash(mechanism), text
            assert str(each) == text
        assert copy.inputs == mechanism.inputs, text
        assert copy.program == mechanism.program, text


def is_settable(mechanism, name):
    try:
        setattr(mechanism, name, getattr(mechanism, name, 1))
    except dataclasses.FrozenInstanceError:
        return False
    return True


def test_no_field_of_a_mechanism_can_be_set():
    for mechanism in map(pa.parse, registry.registered()):
        names = [field.name for field in dataclasses.fields(mechanism)]
        assert not [n for n in (*names, "other") if is_settable(mechanism, n)], str(mechanism)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("laser", "softmax[read=log_mean_exp]"),
        ("lucid(laser)", "lucid(softmax[read=log_mean_exp])"),
        ("lucid[eps=0](laser)", "lucid[eps=0](softmax[read=log_mean_exp])"),
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


def test_mechanisms_that_differ_have_different_programs():
    every = [pa.parse(text) for text in expressions()]
    assert len({*every}) == len({m.program for m in every}) == len(every)


def test_the_program_reads_as_the_calls_in_order():
    assert str(pa.parse("lucid(laser)").program) == (
        "y = lucid_solve(k, v); out = softmax[read=log_mean_exp](q, k, v=y)"
    )


def test_a_third_party_mechanism_is_discovered_by_its_entry_point(tmp_path):
    third_party = Path(__file__).parents[1] / "third_party"
    program = (
        "import numpy as np, precondattn as pa\n"
        "assert pa.mechanisms()['doubled'] is type(pa.parse('doubled'))\n"
        "assert pa.parse('doubled')(np.ones((1, 2, 1, 3))).sum() == 12\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(third_party)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_shorthand_of_a_mechanism_without_an_option_refuses_its_input():
    q = np.ones((1, 2, 1, 3))
    for shorthand in (pa.softmax, pa.laser):
        with pytest.raises(TypeError, match="unknown keyword 'lucid_beta'"):
            shorthand(q, q, q, lucid_beta=q[..., 0])
