"""What users of other libraries write is an error that says what to write here."""

import importlib
import inspect
import re

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import other_names
from precondattn.algebra.registry import registered
from tests.core.bad_input import K, Q, V, refuses

SOFTMAX = pa.Softmax()


@pytest.mark.parametrize("name", [*other_names.ANSWERS, "dropout_p"])
def test_a_keyword_of_another_library_is_answered(name):
    answer = other_names.ANSWERS.get(name, other_names.NO_DROPOUT)
    calls = [lambda: SOFTMAX(Q, K, V, **{name: Q}), lambda: pa.lucid(Q, K, V, **{name: True})]
    for call in (*calls, lambda: pa.Lucid(**{name: True})):
        refuses(call, TypeError, answer)
    if name.islower():
        refuses(lambda: pa.parse(f"laser(softmax[{name}=true])"), ValueError, answer)


@pytest.mark.parametrize("library", ["torch", "flax"])
def test_a_layer_answers_it_too(library):
    pytest.importorskip(library)
    layers = importlib.import_module(f"precondattn.layers.{library}")
    more = {} if library == "torch" else {"rngs": importlib.import_module("flax.nnx").Rngs(0)}
    for layer in (layers.Attention, layers.Block, layers.Decoder, layers.VisionTransformer):
        refuses(lambda: layer(4, nhead=2, **more), TypeError, "(here: heads=)")  # noqa: B023
        refuses(lambda: layer(4, headz=2, **more), TypeError, "(did you mean 'heads'?)")  # noqa: B023
    refuses(lambda: layers.Attention(4, 2), TypeError, "Attention.__init__() takes 2 positional")


def test_a_layer_of_others_may_have_their_names():
    torch = pytest.importorskip("torch")
    from precondattn.layers.torch import Attention

    class Own(Attention):
        def __init__(self, **config):
            super().__init__(config["hidden_size"], heads=config["num_heads"])

    assert Own(hidden_size=4, num_heads=2)(torch.ones(1, 2, 4)).shape == (1, 2, 4)


def test_every_answer_is_of_names_that_exist():
    pytest.importorskip("torch")
    from precondattn.layers import torch as layers

    functions = [pa.softmax, pa.mesa, pa.Mesa.extend, SOFTMAX.__call__, SOFTMAX.init_cache]
    functions += [getattr(layers, name).__init__ for name in layers.__all__ if name[0].isupper()]
    functions.append(layers.Attention.forward)
    known = {name for each in functions for name in inspect.signature(each).parameters}
    known |= {name for each in registered().values() for name in each().inputs}
    known |= {field for each in registered().values() for field in each.__dataclass_fields__}
    for answer in other_names.KEYWORDS:
        bare = re.sub(r"'[^']*'", "", re.sub(r"recipes=\{.*\}", "", answer))
        assert {*re.findall(r"(\w+)=", bare)} <= known | {"segment_ids", "key_mask"}, answer
        for text in re.findall(r"'(\w+[\[(].*[\])])'", answer):
            pa.parse(text)


def test_no_name_has_two_answers():
    for table, by_name in (
        (other_names.KEYWORDS, other_names.ANSWERS),
        (other_names.MECHANISMS, other_names.EXPRESSIONS),
    ):
        assert len(" ".join(table.values()).split()) == len(by_name)


def test_a_layer_is_imported_from_the_package_of_its_library():
    with pytest.raises(ImportError, match=r"import Attention from precondattn\.layers\.torch or "):
        from precondattn.layers import Attention  # noqa: F401


def missing_attribute(name):
    """The error of an attribute that the package has not."""
    with pytest.raises(AttributeError) as caught:
        getattr(pa, name)
    return str(caught.value)


@pytest.mark.parametrize(("name", "text"), other_names.EXPRESSIONS.items())
def test_a_mechanism_by_another_name_is_answered_with_its_expression(name, text):
    pa.parse(text)
    assert name not in pa.mechanisms()
    for other in (name, name.upper(), name.replace("_", "-")):
        message = f"unknown mechanism {other!r}; here it is {text!r}"
        refuses(lambda: pa.parse(other), ValueError, message)  # noqa: B023
        refuses(lambda: pa.parse(f"lucid({other})"), ValueError, message)  # noqa: B023
    if not hasattr(pa, name):
        assert f"{name!r}; here it is pa.parse({text!r})" in missing_attribute(name)


def test_a_misspelt_name_is_answered_with_the_nearest():
    for name, meant in (("Lucid", "lucid"), ("qk-norm", "qk_norm"), ("gated_dleta", "gated_delta")):
        refuses(lambda: pa.parse(name), ValueError, f"(did you mean {meant!r}?)")  # noqa: B023
    assert missing_attribute("LUCID").endswith("'LUCID' (did you mean 'lucid'?)")
    assert missing_attribute("nothing").endswith("has no attribute 'nothing'")


SLIPS = [
    ("lucid: base must be a mechanism; found 'laser'", lambda: pa.Lucid("laser")),
    ("write lucid(laser)", lambda: pa.parse("laser(lucid)")),
    ("found the mechanism lucid, which needs no parse", lambda: pa.parse(pa.Lucid())),
    (
        "the others by name, as in (q, k, v, g=g, beta=beta); found 5 by position",
        lambda: pa.gated_delta(Q, K, V, 1, 1),
    ),
    (
        "what is added to scores is bias, as in pa.softmax(q, k, v, bias=attn_mask)",
        lambda: masked(attn_mask=np.zeros((1, 1, 4, 4))),
    ),
    (
        "found int64; where 0 is masked, write key_mask != 0",
        lambda: masked(key_mask=np.ones((2, 4), np.int64)),
    ),
    *(
        (
            f"{cls.name}: a mechanism is built from options, and then called on arrays, as in "
            f"{cls.__name__}()(q, k, v); found an array of shape (2, 4, 2, 3)",
            run,
        )
        for cls, run in (
            (pa.Lucid, lambda: pa.Lucid(Q, K, V)),
            (pa.Softmax, lambda: pa.Softmax(q=Q, k=K, v=V)),
        )
    ),
    (
        "unknown option 'window' (it belongs to the base: lucid(softmax[window=3]))",
        lambda: pa.Lucid(window=3),
    ),
    (
        "(it belongs to the base: lucid(softmax[window=3]))",
        lambda: pa.parse("lucid[window=3]"),
    ),
    (
        "'causal' (an option, which is set before the call: pa.Softmax(causal=False))",
        lambda: pa.Lucid()(Q, K, V, causal=False),
    ),
]


def masked(**mask):
    return pa.softmax(Q, K, V, **mask)


@pytest.mark.parametrize(("text", "run"), SLIPS)
def test_a_slip_of_the_first_hour_is_answered(text, run):
    refuses(run, (TypeError, ValueError), text)


def heads_first(*heads, tokens=16):
    return [np.zeros((2, h, tokens, 4)) for h in heads]


EXCHANGED = "exchanged: here the layout is (b, t, h, d), and not (b, h, t, d)"


@pytest.mark.parametrize(
    ("name", "heads", "named", "which"),
    [
        ("softmax", (8, 2, 2), {}, "q, k, v"),
        ("delta", (8, 8, 8), {"beta": np.zeros((2, 16, 8))}, "q, k, v"),
        ("deltaformer", (8, 2, 2), {"beta": np.zeros((2, 8, 16))}, "q, k, v, beta"),
    ],
)
def test_arrays_with_heads_before_tokens_are_recognised_where_shapes_show_it(
    name, heads, named, which
):
    text = f"axes 1 and 2 of {which} {EXCHANGED}"
    refuses(lambda: pa.parse(name)(*heads_first(*heads), **named), pa.ShapeError, text)


def test_other_shapes_that_disagree_are_not_taken_for_them():
    q, k, v = np.zeros((3, 2, 16, 8, 4))
    for arrays in ((q, k[:, :15], v[:, :15]), (q, k[:, :, :3], v[:, :, :3]), (q, k, v[:, :, :7])):
        with pytest.raises(pa.ShapeError, match=r"^((?!exchanged)[\s\S])*$"):
            SOFTMAX(*arrays)
