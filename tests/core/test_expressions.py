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
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.declaration import Inputs
from precondattn.algebra.options import fields_of
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_conformance.declared import compositions, expressions

sampled = settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)

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


def test_every_declared_expression_is_the_text_of_its_mechanism():
    for text in expressions():
        assert str(pa.parse(text)) == text


@sampled
@given(softmaxes() | lasers() | lucids())
def test_parse_is_the_inverse_of_str_for_any_options(mechanism):
    text = str(mechanism)
    again = pa.parse(text)
    assert again == mechanism
    assert hash(again) == hash(mechanism)
    assert str(again) == text
    assert again.program == mechanism.program


@sampled
@given(softmaxes() | lasers() | lucids())
def test_the_text_contains_exactly_the_options_that_differ_from_the_default(mechanism):
    own = str(mechanism).partition("(")[0]
    named = re.findall(r"(\w+)=", own)
    differing = [n for n, f in fields_of(mechanism).items() if getattr(mechanism, n) != f.default]
    assert named == differing
    assert ("[" in own) == bool(differing)
    base = getattr(mechanism, "base", pa.Softmax())
    assert ("(" in str(mechanism)) == (base != pa.Softmax())


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lucd",
            "'lucd': unknown mechanism 'lucd' (did you mean 'lucid'?); known are atk, b",
        ),
        ("lucid(sofmax)", "unknown mechanism 'sofmax' (did you mean 'softmax'?)"),
        (
            "xyz",
            "'xyz': unknown mechanism 'xyz'; known are atk, bidirectional, ccq, channel, comba",
        ),
        (
            "lucid[epz=0]",
            "'lucid[epz=0]': lucid has no option 'epz' (did you mean 'eps'?); it has normalize, "
            "scale, eps, beta, detach_max",
        ),
        ("laser[scale=1]", "'laser[scale=1]': laser has no option 'scale' (it belongs to the base"),
        ("lucid[base=softmax]", "lucid has no option 'base'; it has normalize, scale, eps"),
        ("lucid[eps=0,eps=1]", "'lucid[eps=0,eps=1]': option eps is given twice"),
        ("lucid[eps=-1]", "lucid: option eps must be a finite number, 0 or above; found -1.0"),
        ("lucid[eps=abc]", "lucid: option eps must be a finite number, 0 or above; found 'abc'"),
        ("lucid[eps=none]", "lucid: option eps must be a finite number, 0 or above; found 'none'"),
        ("lucid[eps=1e400]", "lucid: option eps must be a finite number, 0 or above; found inf"),
        ("softmax[scale=nan]", "softmax: option scale must be a finite number above 0, or None"),
        ("softmax[scale=0]", "softmax: option scale must be a finite number above 0, or None"),
        ("softmax[causal=1]", "softmax: option causal must be true or false; found '1'"),
        ("softmax[causal=False]", "softmax: option causal must be true or false; found 'False'"),
        ("softmax[window=1.5]", "option window must be a whole number, 1 or above, or None; found"),
        ("softmax[window=0]", "option window must be a whole number, 1 or above, or None; found 0"),
        (
            "softmax[read=max]",
            "option read must be one of mean, log_mean_exp, mean_and_log_sum; found 'max'",
        ),
        (
            "lucid[normalize=row]",
            "lucid: option normalize must be one of 'keys', 'queries_and_keys', 'rows', 'none'; "
            "found 'row'",
        ),
        (
            "softmax(lucid)",
            "softmax is a base and takes no base (did you mean 'lucid(softmax)'?)",
        ),
        ("rms_norm(softmax)", "'rms_norm(softmax)': rms_norm is a piece and takes no base"),
        ("", "expected the name of a mechanism here:\n  \n  ^"),
        ("3", "expected the name of a mechanism here:\n  3\n  ^"),
        ("lucid()", "expected the name of a mechanism here:\n  lucid()\n        ^"),
        ("lucid[,eps=0]", "expected the name of an option here:\n  lucid[,eps=0]\n        ^"),
        ("lucid[eps]", "expected '=' and the value of eps here:\n  lucid[eps]\n           ^"),
        ("lucid[eps=]", "expected the value of eps here:\n  lucid[eps=]\n            ^"),
        ("lucid[eps=0", "expected ']' (a bracket is missing) here:\n  lucid[eps=0\n             ^"),
        ("lucid[eps=0(laser)", "expected ',' or ']' here:\n  lucid[eps=0(laser)\n             ^"),
        ("lucid(laser", "expected ')' here:\n  lucid(laser\n             ^"),
        ("lucid x", "expected the end of the expression here:\n  lucid x\n        ^"),
        ("lucid)", "expected the end of the expression here:\n  lucid)\n       ^"),
        ("lucid(laser))", "expected the end of the expression here:\n  lucid(laser))\n"),
        ("lucid[eps=0][beta=true]", "expected the end of the expression here:\n"),
    ],
)
def test_invalid_text_is_refused_with_the_position_or_the_name(text, message):
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


def test_every_pair_of_mechanisms_is_either_an_expression_or_refused():
    result = compositions()
    assert {text for text, reason in result.items() if reason is None} >= {"lucid(laser)", "lucid"}
    refused = {text for text, reason in result.items() if reason is not None}
    assert refused >= {"lucid(lucid)", "laser(lucid)", "laser(laser)"}


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


def test_no_two_declared_expressions_are_equal():
    assert len({pa.parse(text) for text in expressions()}) == len(expressions())


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


# Toy mechanisms, with names that no real mechanism has; they are unregistered after the test.


@pytest.fixture
def toy():
    """Names for toy mechanisms; whatever a test registers is unregistered after it."""
    before = registry.registered()
    yield
    for name in set(registry.registered()) - set(before):
        registry.unregister(name)
    assert registry.registered() == before


class _Pointwise(pa.TokenWise):
    """The base class of toy pieces; it has no name and is therefore not registered."""

    output = "b t h d"

    def backward(self, x, frame, out, residuals, cotangent):
        raise NotImplementedError


def difference_leaf():
    @dataclass(frozen=True)
    class Difference(_Pointwise):
        name: ClassVar[str] = "toy_difference"
        inputs = Inputs(left="b t h d", right="b t h d")

        def forward(self, x, frame):
            return x["left"] - x["right"], ()

    return Difference()


def scaling_leaf(name):
    @dataclass(frozen=True)
    class Scaling(_Pointwise):
        inputs = Inputs(x="b t h d", strength="b t h d")

        def forward(self, x, frame):
            return x["x"] * x["strength"], ()

    # The name is given last: a class with a name is registered when it is created.
    return dataclass(frozen=True)(type(name, (Scaling,), {"name": name}))()


def wiring(name, make_steps):
    """A preconditioner whose steps are `make_steps(base)`."""

    @dataclass(frozen=True)
    class Wired(pa.Preconditioner):
        base: pa.Mechanism = pa.Softmax()

        def steps(self):
            return tuple(make_steps(self.base))

    Wired.__name__ = Wired.__qualname__ = name
    return dataclass(frozen=True)(type(name, (Wired,), {"name": name}))


@pytest.mark.usefixtures("toy")
class TestNamesThatClash:
    """Construction refuses an input that would mean two things."""

    def test_one_input_with_two_meanings_is_refused(self):
        strong, weak = scaling_leaf("toy_strong"), scaling_leaf("toy_weak")
        both = wiring(
            "toy_both",
            lambda base: [
                pa.step("a", strong, x="q"),
                pa.step("b", weak, x="a"),
                pa.step("out", base, q="b"),
            ],
        )
        message = (
            "toy_both(softmax): the input 'strength' would mean two things, that of toy_strong and "
            "that of toy_weak"
        )
        with pytest.raises(TypeError, match=re.escape(message)):
            both()

    def test_one_input_with_one_meaning_serves_two_steps(self):
        strong = scaling_leaf("toy_strong")
        twice = wiring(
            "toy_twice",
            lambda base: [
                pa.step("a", strong, x="q"),
                pa.step("b", strong, x="a"),
                pa.step("out", base, q="b"),
            ],
        )
        assert list(twice().inputs) == ["q", "k", "v", "strength"]

    def test_the_base_and_a_preconditioner_can_not_mean_two_things_by_one_input(self):
        weak = scaling_leaf("toy_weak")
        inner = wiring(
            "toy_inner", lambda base: [pa.step("a", weak, x="q"), pa.step("out", base, q="a")]
        )
        strong = scaling_leaf("toy_strong")
        outer = wiring(
            "toy_outer", lambda base: [pa.step("a", strong, x="q"), pa.step("out", base, q="a")]
        )
        message = "toy_outer(toy_inner): the input 'strength' would mean two things"
        with pytest.raises(TypeError, match=re.escape(message)):
            outer(inner())

    def test_renaming_an_input_onto_another_of_the_base_is_refused(self):
        merged = wiring("toy_merged", lambda base: [pa.step("out", base, q="k")])
        message = "toy_merged(softmax): q would be renamed to k, which softmax declares already"
        with pytest.raises(TypeError, match=re.escape(message)):
            merged()

    def test_a_pairing_around_itself_is_refused(self):
        pair = paired()
        message = "toy_pair(toy_pair): q would be renamed to q2, which toy_pair declares already"
        with pytest.raises(TypeError, match=re.escape(message)):
            pair(pair())

    def test_a_step_with_the_name_of_an_input_is_refused(self):
        normed = wiring(
            "toy_normed",
            lambda base: [pa.step("k", pa.RMSNorm(), x="k"), pa.step("out", base)],
        )
        message = "toy_normed: 'k' is both a step and an input"
        with pytest.raises(TypeError, match=re.escape(message)):
            normed()

    def test_two_steps_of_one_name_are_refused(self):
        remade = wiring(
            "toy_remade",
            lambda base: [
                pa.step("a", pa.RMSNorm(), x="q"),
                pa.step("a", pa.RMSNorm(0.5), x="a"),
                pa.step("out", base, q="a"),
            ],
        )
        with pytest.raises(TypeError, match=r"toy_remade: .*'a'"):
            remade()

    def test_renaming_an_input_that_the_step_lacks_is_refused(self):
        mistaken = wiring(
            "toy_mistaken",
            lambda base: [
                pa.step("q_unit", pa.RMSNorm(), x="q"),
                pa.step("out", base, query="q_unit"),
            ],
        )
        with pytest.raises(TypeError, match=r"toy_mistaken.*'?query'?"):
            mistaken()

    def test_a_taken_name_is_refused(self):
        with pytest.raises(ValueError, match=r"the name 'softmax' is taken by precondattn\.spec"):
            wiring("softmax", lambda base: [pa.step("out", base)])

    def test_an_unknown_name_can_not_be_unregistered(self):
        with pytest.raises(ValueError, match="there is no mechanism 'toy_none'; known are atk, b"):
            registry.unregister("toy_none")


def paired():
    difference = difference_leaf()
    return wiring(
        "toy_pair",
        lambda base: [
            pa.step("first", base),
            pa.step("second", base, q="q2"),
            pa.step("out", difference, left="first", right="second"),
        ],
    )


def null():
    difference = difference_leaf()
    return wiring(
        "toy_null",
        lambda base: [
            pa.step("first", base),
            pa.step("second", base),
            pa.step("out", difference, left="first", right="second"),
        ],
    )


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
    programs = {pa.parse(text).program for text in expressions()}
    assert len(programs) == len(expressions())


def test_the_program_reads_as_the_calls_in_order():
    assert str(pa.parse("lucid(laser)").program) == (
        "y = lucid_solve(k, v); out = softmax[read=log_mean_exp](q, k, v=y)"
    )


@pytest.mark.usefixtures("toy")
class TestPrograms:
    """Every result has one name, and is computed and stored once."""

    def test_a_leaf_called_twice_on_the_same_inputs_is_called_once(self):
        assert str(null()().program) == (
            "first = softmax(q, k, v); out = toy_difference(left=first, right=first)"
        )

    def test_a_leaf_may_read_one_array_as_two_of_its_inputs(self):
        q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 3))
        np.testing.assert_array_equal(null()()(q, k, v), np.zeros_like(q))

    def test_a_solve_that_two_branches_share_is_one_call(self):
        program = paired()(pa.Lucid()).program
        assert [leaf.name for leaf in program.leaves].count("lucid_solve") == 1
        assert [leaf.name for leaf in program.leaves].count("softmax") == 2

    def test_an_appended_input_comes_after_those_of_the_base(self):
        assert list(paired()(pa.Lucid(beta=True)).inputs) == ["q", "k", "v", "lucid_beta", "q2"]

    @pytest.mark.parametrize(
        ("base", "kept"),
        [("softmax", ["k", "v"]), ("laser", ["k", "v"]), ("lucid", ["first.y", "k", "rms(k)"])],
    )
    def test_an_array_is_stored_once_in_the_cache_however_many_calls_read_it(self, base, kept):
        mechanism = paired()(pa.parse(base))
        q, k, v, q2 = np.random.default_rng(0).normal(size=(4, 2, 6, 2, 3))
        cache = mechanism.init_cache(q, k, v, capacity=8)
        assert sorted(cache.store) == kept
        parts = []
        for a, b in ((0, 1), (1, 4), (4, 6)):
            new = (array[:, a:b] for array in (q, k, v))
            out, cache = mechanism.extend(cache, *new, q2=q2[:, a:b])
            parts.append(out)
        whole = mechanism(q, k, v, q2=q2)
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-12, atol=1e-12)
        expected = pa.parse(base)(q, k, v) - pa.parse(base)(q2, k, v)
        np.testing.assert_allclose(whole, expected, rtol=1e-12, atol=1e-12)

    def test_lucid_of_laser_keeps_y_and_not_v(self):
        q, k, v = np.ones((3, 1, 2, 1, 2))
        cache = pa.parse("lucid(laser)").init_cache(q, k, v, capacity=4)
        assert sorted(cache.store) == ["k", "rms(k)", "y"]

    def test_a_toy_is_an_expression_as_long_as_it_is_registered(self):
        pair = paired()
        assert str(pair(pa.Lucid(eps=0))) == "toy_pair(lucid[eps=0])"
        assert pa.parse("toy_pair(lucid[eps=0])") == pair(pa.Lucid(eps=0))
        registry.unregister("toy_pair")
        assert_refused("toy_pair", ValueError, "unknown mechanism 'toy_pair'")


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


def test_an_option_that_is_an_object_may_be_given_by_its_name():
    assert pa.Softmax(read="log_mean_exp") == pa.Softmax(read=LOG_MEAN_EXP)
    assert pa.Softmax(window=np.int64(3)) == pa.Softmax(window=3)


def test_a_shorthand_of_a_mechanism_without_an_option_refuses_its_input():
    q = np.ones((1, 2, 1, 3))
    for shorthand in (pa.softmax, pa.laser):
        with pytest.raises(TypeError, match="unknown keyword 'lucid_beta'"):
            shorthand(q, q, q, lucid_beta=q[..., 0])
