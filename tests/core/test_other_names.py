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
    for table, by_name in (
        (other_names.KEYWORDS, other_names.ANSWERS),
        (other_names.MECHANISMS, other_names.EXPRESSIONS),
    ):
        assert len(" ".join(table.values()).split()) == len(by_name)  # None has two answers.
    for answer in other_names.KEYWORDS:
        bare = re.sub(r"'[^']*'", "", re.sub(r"recipes=\{.*\}", "", answer))
        assert {*re.findall(r"(\w+)=", bare)} <= known | {"segment_ids", "key_mask"}, answer
        for text in re.findall(r"'(\w+[\[(].*[\])])'", answer):
            pa.parse(text)


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
    with pytest.raises(ImportError, match=r"import Attention from precondattn\.layers\.torch or "):
        from precondattn.layers import Attention  # noqa: F401


SLIPS = [
    ("lucid: base must be a mechanism; found 'laser'", lambda: pa.Lucid("laser")),
    ("write lucid(laser)", lambda: pa.parse("laser(lucid)")),
    ("found the mechanism lucid, which needs no parse", lambda: pa.parse(pa.Lucid())),
    (
        "the others by name, as in (q, k, v, g=g, beta=beta); found 5 by position",
        lambda: pa.gated_delta(Q, K, V, 1, 1),
    ),
    *(
        (words, lambda name=name, mask=mask: pa.softmax(Q, K, V, **{name: mask}))
        for words, name, mask in (
            (
                "bias, as in pa.softmax(q, k, v, bias=attn_mask)",
                "attn_mask",
                np.zeros((1, 1, 4, 4)),
            ),
            (
                "found int64; where 0 is masked, write key_mask != 0",
                "key_mask",
                np.ones((2, 4), int),
            ),
        )
    ),
    ("called on arrays, as in Lucid()(q, k, v); found an array of", lambda: pa.Lucid(Q, K, V)),
    ("called on arrays, as in Softmax()(q, k, v); found", lambda: pa.Softmax(q=Q, k=K, v=V)),
    ("unknown option 'window' (it belongs to the base: lucid(soft", lambda: pa.Lucid(window=3)),
    ("(it belongs to the base: lucid(softmax[window=3]))", lambda: pa.parse("lucid[window=3]")),
    ("unknown keyword 'lucid_beta'", lambda: pa.laser(Q, K, V, lucid_beta=Q[..., 0])),
    (
        "'causal' (an option, which is set before the call: pa.Softmax(causal=False))",
        lambda: pa.Lucid()(Q, K, V, causal=False),
    ),
]


@pytest.mark.parametrize(("text", "run"), SLIPS)
def test_a_slip_of_the_first_hour_is_answered(text, run):
    refuses(run, (TypeError, ValueError), text)


HEADS_FIRST = np.zeros((2, 8, 16, 4))
EXCHANGED = "exchanged: here the layout is (b, t, h, d), and not (b, h, t, d)"


@pytest.mark.parametrize(
    ("name", "heads", "named", "words"),
    [
        ("softmax", 2, {}, "axes 1 and 2 of q, k, v"),
        ("delta", 8, {"beta": np.zeros((2, 16, 8))}, "axes 1 and 2 of q, k, v"),
        ("deltaformer", 2, {"beta": np.zeros((2, 8, 16))}, "axes 1 and 2 of q, k, v, beta"),
    ],
)
def test_arrays_with_heads_before_tokens_are_recognised_where_shapes_show_it(
    name, heads, named, words
):
    m, x = pa.parse(name), [HEADS_FIRST, HEADS_FIRST[:, :heads], HEADS_FIRST[:, :heads]]
    refuses(lambda: m(*x, **named), pa.ShapeError, f"{words} {EXCHANGED}")
    if name == "softmax":
        m(*(a.swapaxes(1, 2) for a in x), **named)


def test_other_shapes_that_disagree_are_not_taken_for_them():
    q, k, v = np.zeros((3, 2, 16, 8, 4))
    short = {"key_mask": np.ones((2, 15), bool)}
    for arrays, mask in (
        ((q, k[:, :15], v[:, :15]), {}),
        ((q, k[:, :, :3], v[:, :, :3]), {}),
        ((q, k, v[:, :, :7]), {}),
        ([HEADS_FIRST] * 3, short),
    ):
        with pytest.raises(pa.ShapeError, match=r"^((?!exchanged)[\s\S])*$"):
            SOFTMAX(*arrays, **mask)
