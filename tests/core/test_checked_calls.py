"""A checked call examines the values of its inputs, by what the mechanism declares."""

import math
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.call import Call
from precondattn.execution import checked
from precondattn.execution.arguments import bind
from precondattn.execution.examined_values import examine
from precondattn.execution.input_names import MASKS
from precondattn.execution.signature import signature_of
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("checked", b=2, t=18, s=18, h=4, n=2, d=4, e=4)


def inputs_of(expression, kind="random"):
    mechanism = pa.parse(expression)
    return mechanism, make_inputs(mechanism, LAYOUT, kind)


def examined(mechanism, x):
    """Examine a call without computing it."""
    call = Call("forward", mechanism, (), x, dict.fromkeys(MASKS), "reference")
    with pa.checked(layout=False):
        examine(mechanism, bind(call, signature_of(call)), is_full=True)


def declared_ranges():
    """Every declared input with a range or with unit rows, with its pattern."""
    seen = {}
    for expression in expressions():
        for name, pattern in pa.parse(expression).inputs.items():
            if pattern.unit or pattern.low is not None:
                seen.setdefault((expression.partition("(")[0], name, pattern.text), expression)
    return [(expression, name) for (_, name, _), expression in seen.items()]


def outside(pattern):
    """Values outside of what a pattern declares, each with what the error says of it."""
    if pattern.unit:
        return [(3.0, "is a row of length 3, not at most 1")]
    values = []
    if math.isfinite(pattern.high):
        values.append((pattern.high + 0.5, f"is {pattern.high + 0.5:g}, not "))
    if math.isfinite(pattern.low):
        low = min(pattern.low, 0.0)
        values.append((low - 0.5, f"is {low - 0.5:g}, not "))
        if pattern.open_low:
            values.append((low, f"is {low:g}, not above {low:g}"))
    if pattern.low > 0:  # The range of what is usual.
        del values[0]
    return values


def test_every_declared_expression_accepts_the_inputs_that_it_declares():
    for expression in expressions():
        examined(*inputs_of(expression))


def test_a_value_outside_of_each_declared_range_is_an_error_with_its_place():
    ranges = declared_ranges()
    assert len(ranges) > 100
    for expression, name in ranges:
        mechanism, x = inputs_of(expression)
        pattern, good = mechanism.inputs[name], x[name]
        for value, text in outside(pattern):
            bad = np.array(good)
            row = bad if not pattern.unit else bad[..., 0]
            place = tuple(size - 1 for size in row.shape)
            if pattern.unit:
                bad[place] = 0.0
            bad[(*place, 0) if pattern.unit else place] = value
            index = f"[{', '.join(map(str, place))}]" if place else ""
            with pa.checked(layout=False), pytest.raises(ValueError, match=re.escape(text)) as c:
                mechanism(**{**x, name: bad})
            assert str(c.value).startswith(f"{mechanism}: {name}{index} is "), expression


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_errors_except_a_decay_to_nothing(value):
    mechanism, x = inputs_of("gated_delta")
    for name in x:
        bad = {**x, name: x[name].copy()}
        bad[name].flat[-1] = value
        if name == "g" and value == -math.inf:
            examined(mechanism, bad)
            continue
        with pytest.raises(ValueError, match=rf"gated_delta: {name}\[.*\] is {value}, not finite"):
            examined(mechanism, bad)
    biased, x = inputs_of("softmax[bias=true]")
    x["bias"] = np.where(np.arange(18) > 9, value, x["bias"])
    is_bad = pytest.raises(ValueError, match=r"bias\[.*\] is .*, not finite")
    with nullcontext() if value == -math.inf else is_bad:
        examined(biased, x)


@pytest.mark.parametrize(
    ("expression", "name", "advice"),
    [
        ("gated_delta", "g", "write log(x) of a decay x, or -softplus(x)"),
        ("gated_delta", "beta", "write 2 * sigmoid(x)"),
        ("temperature", "tau", "write softplus(x) or exp(x)"),
        ("gated_delta", "k", "by its length, or write qk_norm[norm=l2](gated_delta)"),
        ("path", "w", "divide each row of w by its length"),
        ("ccq", "contraction", "write sigmoid(x)"),
    ],
)
def test_an_error_says_what_to_write_instead(expression, name, advice):
    mechanism, x = inputs_of(expression)
    x[name] = np.where(x[name] > -np.inf, -5.0 if name in ("tau", "contraction") else 5.0, 0)
    with pytest.raises(ValueError, match=re.escape(advice) + "$"):
        examined(mechanism, x)


def test_rows_that_were_rounded_to_bfloat16_have_length_1():
    torch = pytest.importorskip("torch")
    mechanism, x = inputs_of("gated_delta")
    x = {name: torch.tensor(array, dtype=torch.bfloat16) for name, array in x.items()}
    examined(mechanism, x)
    x["k"] = x["k"] * 1.02
    with pytest.raises(ValueError, match=r"is a row of length 1\.0"):
        examined(mechanism, x)


@pytest.mark.parametrize(
    "masks", [{"lengths": [16, 18]}, {"key_mask": np.tile(np.arange(18) < 16, (2, 1))}]
)
def test_padding_and_masked_keys_are_not_examined(masks):
    mechanism, x = inputs_of("atk")
    for name, array in x.items():
        if "s" in mechanism.inputs[name].letters:
            array[: 1 if "lengths" in masks else 2, 16:] = np.nan
    cache = mechanism.init_cache(**x)
    with pa.checked(layout=False):
        mechanism(**x, **masks)
        mechanism.extend(cache, **x, **masks)
        x["beta_atk"][1, 15] = 0.0
        with pytest.raises(ValueError, match=r"beta_atk\[1, 15, 0\] is 0, not above 0 and at most"):
            mechanism(**x, **masks)


def test_more_heads_than_tokens_are_a_transposed_layout():
    heads_first = np.zeros((3, 1, 4, 16, 8))
    with pa.checked(), pytest.raises(pa.ShapeError, match=r"heads than tokens \(16 and 4\)"):
        pa.softmax(*heads_first)
    with pa.checked():
        pa.softmax(*heads_first[:, :, :1])  # One token.
        with pa.checked(layout=False):
            pa.softmax(*heads_first)
        cache = pa.Softmax().init_cache(*heads_first, capacity=8)
        pa.Softmax().extend(cache, *heads_first)


def test_every_verb_is_checked_and_none_without_the_context():
    mechanism, x = inputs_of("gated_delta")
    one = {name: array[:1] for name, array in x.items()}
    one["k"] *= 2
    start, two = mechanism.init_cache(**one), mechanism.init_cache(**one, sequences=2)
    for run in (
        lambda: mechanism(**one),
        lambda: mechanism.vjp(**one),
        lambda: mechanism.extend(start, **one),
        lambda: mechanism.extend(start, **one, keep=2),
        lambda: mechanism.extend(two, **one, cu_seqlens=[0, 5, 18]),
        lambda: mechanism.extend_vjp(two, **one, cu_seqlens=[0, 5, 18]),
        lambda: pa.gated_delta(**one),
    ):
        run()
        with pa.checked(), pytest.raises(ValueError, match="is a row of length 2"):
            run()
    assert checked.CHECKS.get() is None


KINDS = [
    ("softmax", "v", math.nan, "v[0, 0, 0, 0] is nan, not finite"),
    ("delta", "k", 2.0, "k[0, 0, 0] is a row of length 4, not at most 1 (143 more)"),
    ("gated_delta", "g", 0.5, "g[0, 0, 0] is 0.5, not at most 0"),
    ("delta", "beta", 3.0, "beta[0, 0, 0] is 3, not between 0 and 2"),
    ("mesa", "lam_mesa", 0.0, "is 0, not above 0"),
    ("softmax", None, 0.0, "more heads than tokens (4 and 3)"),
]
"""A mechanism, its input, what all entries are, and the error: one for each kind of values."""


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
@pytest.mark.parametrize(("expression", "name", "value", "text"), KINDS)
def test_each_kind_of_values_is_examined_on_each_library(library, expression, name, value, text):
    xp = pytest.importorskip(library)
    mechanism, x = inputs_of(expression)
    if name is None:
        x = {each: array[:, :3] for each, array in x.items()}
    else:
        x[name] = np.full_like(x[name], value)
    arrays = {each: xp.asarray(array) for each, array in x.items()}
    with pa.checked(), pytest.raises(ValueError, match=re.escape(text)):
        mechanism(**arrays)
    if name is None:
        with pa.checked(layout=False):
            mechanism(**arrays)


@pytest.mark.parametrize(
    ("sequences", "options"),
    [
        (2, {"cu_seqlens": [0, 3, 16]}),
        (4, {"segment_ids": np.asarray([[0] * 5 + [1] * 13, [2] * 12 + [3] * 6])}),
        (2, {"keep": 9, "lengths": [16, 18]}),
        (2, {"states_every": 5, "lengths": [16, 18]}),
    ],
)
def test_the_place_is_that_in_the_given_tokens_where_an_extension_is_divided(sequences, options):
    mechanism, x = inputs_of("gated_delta")
    if "cu_seqlens" in options:
        x = {name: array[:1] for name, array in x.items()}
    cache = mechanism.init_cache(**x, sequences=sequences)
    if "segment_ids" not in options:
        x["k"][0, 16:] = np.nan  # Padding.
    with pa.checked(layout=False):
        mechanism.extend(cache, **x, **options)
        x["k"][0, 11, 1] *= 2
        with pytest.raises(
            ValueError, match=r": k\[0, 11, 1\] is a row of length 2, not at most 1"
        ):
            mechanism.extend(cache, **x, **options, donate=True)
    assert cache.store  # Nothing was written to it.


@pytest.mark.parametrize(
    ("variable", "passes"), [pytest.param("0", True, marks=pytest.mark.thorough), ("1", False)]
)
def test_a_variable_checks_every_call_of_a_process(variable, passes):
    code = "import numpy as np, precondattn as pa; pa.softmax(*np.full((3, 1, 2, 1, 2), np.nan))"
    environment = {"PRECONDATTN_CHECKED": variable, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == passes
    assert ("q[0, 0, 0, 0] is nan, not finite" in done.stderr) != passes


def by_jit(call, x):
    jax = pytest.importorskip("jax")
    jax.jit(call)({name: jax.numpy.asarray(array) for name, array in x.items()})


def by_vmap(call, x):
    torch = pytest.importorskip("torch")
    torch.func.vmap(call)({name: torch.tensor(array)[None] for name, array in x.items()})


def by_compile(call, x):
    torch = pytest.importorskip("torch")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled({name: torch.tensor(array) for name, array in x.items()})


@pytest.mark.parametrize(
    "traced", [by_jit, by_vmap, pytest.param(by_compile, marks=pytest.mark.thorough)]
)
def test_a_traced_call_says_that_values_can_not_be_looked_at(traced):
    mechanism, x = inputs_of("delta")
    with pa.checked(), pytest.warns(pa.NotCheckedWarning, match="can not look at the values of"):
        traced(lambda x: mechanism(**x), {**x, "k": 2 * x["k"]})


def test_published_recipes_of_layers_pass():
    torch = pytest.importorskip("torch")
    from precondattn.layers.torch import Attention

    x = 3 * torch.randn(1, 10, 16)
    with pa.checked(layout=False):
        for name in ("gated_delta", "kda", "comba", "dplr", "path", "gsa", "ccq(delta)", "mesa"):
            Attention(16, heads=2, mechanism=name)(x)
