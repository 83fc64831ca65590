"""What users of other libraries write is an error that says how it is said here."""

import ast
import importlib
import inspect
import re

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.foreign_keywords import CALL, KEYWORDS, LAYER, MODEL, of_each_layer
from precondattn.algebra.foreign_mechanisms import ABSENT, MECHANISMS, REMARKS
from precondattn.algebra.given_mechanism import PLACES
from precondattn.layers.foreign_arguments import OF_CALLS
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.bad_input import K, Q, V, cache_for, case, refuses

ROWS = [
    pytest.param(library, name, answer, id=name)
    for library, answers in KEYWORDS.items()
    for name, answer in answers.items()
]
SOFTMAX = pa.Softmax()


@pytest.mark.parametrize(("library", "name", "answer"), ROWS)
def test_a_keyword_of_another_library_is_answered_wherever_it_is_given(library, name, answer):
    given, setting = {name: Q}, {name: True}
    answered = f"{name!r} (of {library}; here: {answer.at(CALL)})"
    for of, call in (
        (pa.Softmax.__call__, lambda: SOFTMAX(Q, K, V, **given)),
        (pa.Softmax.vjp, lambda: SOFTMAX.vjp(Q, K, V, **setting)),
        (pa.Softmax.explain, lambda: SOFTMAX.explain(Q, K, V, **given)),
        (pa.Softmax.init_cache, lambda: SOFTMAX.init_cache(Q, K, V, **given)),
        (pa.Softmax.extend, lambda: SOFTMAX.extend(cache_for(), Q, K, V, **setting)),
        (pa.Softmax.__call__, lambda: pa.softmax(Q, K, V, **given)),
        (pa.Softmax.__call__, lambda: pa.lucid(Q, K, V, **setting)),
        (pa.Softmax.__init__, lambda: pa.Lucid(**setting)),
    ):
        if name not in inspect.signature(of).parameters:  # `extend` has a cache, by this name.
            refuses(call, TypeError, answered)
    if name.islower():
        refuses(lambda: pa.parse(f"laser(softmax[{name}=true])"), ValueError, answered)


@pytest.mark.parametrize(("library", "name", "answer"), ROWS)
def test_a_layer_answers_it_too(library, name, answer):
    torch = pytest.importorskip("torch")
    from precondattn.layers.torch import Attention, Block, Decoder, VisionTransformer

    in_layer, in_model = (
        f"{name!r} (of {library}; here: {answer.at(at)})" for at in (LAYER, MODEL)
    )
    attention, block = Attention(4, heads=1), Block(4, heads=1)
    decoder = Decoder(5, 4, heads=1, layers=["softmax"])
    x, tokens = torch.ones(1, 2, 4), torch.ones(1, 2, dtype=int)
    for call in (
        lambda: Attention(4, **{name: 2}),
        lambda: Block(4, **{name: 2}),
        lambda: VisionTransformer(4, **{name: 2}),
        lambda: attention.init_cache(1, **{name: 2}),
    ):
        refuses(call, TypeError, in_layer)
    for layer, argument in ((attention, x), (block, x)):
        if name not in inspect.signature(layer.forward).parameters:
            refuses(lambda: layer(argument, **{name: None}), TypeError, in_layer)  # noqa: B023
    for call in (
        lambda: Decoder(5, **{name: 2}),
        lambda: decoder.init_caches(1, **{name: 2}),
    ):
        refuses(call, TypeError, in_model)
    for call in (decoder.forward, decoder.generate):
        if name not in inspect.signature(call).parameters:
            refuses(lambda: call(tokens, **{name: 2}), TypeError, in_model)  # noqa: B023


def test_layers_of_flax_answer_them():
    pytest.importorskip("flax")
    from flax import nnx

    from precondattn.layers.flax import Attention, Block, Decoder

    for layer in (Attention, Block):
        refuses(lambda: layer(4, num_heads=2), TypeError, "'num_heads' (of PyTorch's Mul")  # noqa: B023
        refuses(lambda: layer(4, 2), TypeError, f"found {layer.__name__}(4, 2)")  # noqa: B023
        made = layer(4, heads=1, rngs=nnx.Rngs(0))
        x = np.ones((1, 2, 4), np.float32)
        text = (
            "(of Transformers; here: True for tokens, (b, t): layer(x, mask=attention_mask != 0))"
        )
        refuses(lambda: made(x, attention_mask=1), TypeError, text)  # noqa: B023
    decoder = Decoder(5, 4, heads=1, layers=["softmax"], rngs=nnx.Rngs(0))
    tokens = np.ones((1, 2), int)
    cached = "here: caches = model.init_caches(batch, capacity=4096); logits, caches = model("
    refuses(lambda: decoder(tokens, use_cache=True), TypeError, cached)
    refuses(lambda: decoder.init_caches(1, max_cache_len=1), TypeError, "capacity=max_cache_len")
    refuses(lambda: decoder.generate(tokens, max_new_tokens=1), TypeError, "model.generate(tokens,")


def test_a_layer_of_others_may_have_their_names():
    torch = pytest.importorskip("torch")
    from precondattn.layers.torch import Attention

    class Own(Attention):
        def __init__(self, **config):
            super().__init__(config["hidden_size"], heads=config["num_heads"])

    assert Own(hidden_size=4, num_heads=2)(torch.ones(1, 2, 4)).shape == (1, 2, 4)


def arguments_elsewhere():
    """What others give by their keywords: arrays of one sequence of six tokens, and settings."""
    import torch

    q, k, v = torch.randn(3, 1, 6, 2, 4)
    row, pairs, bounds = (1, 6), torch.ones(1, 1, 6, 6, dtype=torch.bool), [0, 2, 6]
    bounds = torch.tensor(bounds, dtype=torch.int32)
    count = torch.tensor([5], dtype=torch.int32)
    slopes = torch.tensor([0.5, 0.25])
    tokens = torch.randint(0, 9, row)
    return {
        **{"query": q, "key": k, "value": v, "qkv": torch.stack([q, k, v], 2)},
        **dict.fromkeys(("attn_mask", "mask", "custom_mask"), pairs),
        **dict.fromkeys(("key_padding_mask", "src_key_padding_mask"), torch.zeros(row).bool()),
        **{"src_mask": torch.zeros(6, 6).bool(), "attention_mask": torch.ones(row).long()},
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_cpu"), bounds),
        **{"query_start_loc": bounds, "seq_lens": count, "seq_idx": torch.zeros(row).int()},
        **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), count),
        **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), 0.3),
        **{"logits_soft_cap": 20.0, "window_left": 2, "local_window_size": 2},
        **{"window_size": (2, 0), "sliding_window": 3, "alibi_slopes": slopes},
        **{"attn_bias": torch.zeros(1, 2, 6, 6), "initial_state": torch.randn(1, 2, 4, 4)},
        **{"A_log": slopes, "dt_bias": slopes, "lower_bound": -5.0, "g_gamma": -slopes},
        **{"gk": -torch.rand(1, 6, 2, 4), "lamb": torch.rand(2, 4) + 0.1, "num_householder": 2},
        **{"max_cache_len": 16, "batch_size": 1, "max_batch_size": 1, "hidden_states": None},
        **{"max_new_tokens": 2, "max_length": 8, "eos_token_id": 3, "conv_size": 3},
        **dict.fromkeys(("input_ids", "labels"), tokens),
        **{"rope_theta": 100.0, "expand_k": 0.5, "expand_v": 1, "mlp_ratio": 2.0},
        **{"image": 4, "img_size": 4, "patch_size": 2, "in_chans": 3, "num_classes": 3},
        **{"pixel_values": torch.randn(1, 3, 4, 4), "head_v_dim": 4, "num_v_heads": 4},
        **dict.fromkeys(("embed_dim", "d_model", "in_features", "hidden_size"), 8),
        **dict.fromkeys(("qkv_features", "intermediate_size", "dim_feedforward"), 8),
        **dict.fromkeys(("num_heads", "nhead", "num_attention_heads"), 2),
        **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), 1),
        **dict.fromkeys(("head_size", "d_state", "headdim"), 4),
        **dict.fromkeys(("num_layers", "num_hidden_layers", "layer_idx"), 2),
        **{"vocab_size": 9, "w": -torch.rand(1, 6, 2, 4), "u": torch.rand(2, 4)},
    }


def arguments_here():
    """The other variables of an answer's code."""
    import torch

    from precondattn.layers import recipes
    from precondattn.layers import torch as layers

    q, k, v = torch.randn(3, 1, 6, 2, 4)
    attn = pa.Softmax()
    return {
        **{name: getattr(recipes, name) for name in dir(recipes) if name[0].isupper()},
        **{"pa": pa, "torch": torch, "q": q, "k": k, "v": v, "attn": attn},
        **{"g": -torch.rand(1, 6, 2), "beta": torch.rand(1, 6, 2), "slopes": torch.ones(2)},
        **{"segment_ids": torch.zeros(1, 6).int(), "cache": attn.init_cache(q, k, v, capacity=6)},
        **{"x": torch.randn(1, 6, 8), "tokens": torch.randint(0, 9, (1, 6)), "batch": 1},
        **{"positions": torch.arange(6), "width": 8, "heads": 2, "prefix": [2], "capacity": 9},
        "layer": layers.Attention(8, heads=2),
        "model": layers.Decoder(9, 8, heads=2, layers=2, mechanism="softmax"),
    }


LAYERS = {
    "Attention": "width=8, heads=2",
    "Block": "width=8, heads=2",
    "Decoder": "vocabulary=9, width=8, heads=2, layers=2, mechanism='softmax'",
    "VisionTransformer": "image=4, patch=2, width=8, heads=2, blocks=1, classes=3",
}


def run(code, names, layers):
    """Run the code of an answer; `heads=num_heads` and the like in the first layer that has it."""
    from precondattn.layers import torch as module

    if not re.match(r"\w+=", code):
        exec(code, names)
        return
    given = {each.arg for each in ast.parse(f"f({code})").body[0].value.keywords}
    of_attention = inspect.signature(module.Attention).parameters.keys()
    for layer in layers:
        takes = inspect.signature(getattr(module, layer)).parameters.keys()
        if given <= (takes | of_attention if layer == "Block" else takes):
            replaced = given | {"mechanism"} if "layers=[" in code else given
            others = [x for x in LAYERS[layer].split(", ") if x.split("=")[0] not in replaced]
            eval(f"{layer}({', '.join([*others, code])})", {**names, layer: getattr(module, layer)})
            return
    raise AssertionError(f"no layer takes {code}")


@pytest.mark.parametrize("place", [CALL, LAYER, MODEL])
@pytest.mark.parametrize(("library", "name", "answer"), ROWS)
def test_the_code_of_every_answer_runs(library, name, answer, place):
    torch = pytest.importorskip("torch")
    code = answer.at(place).code
    names = {**arguments_here(), **arguments_elsewhere()}
    if place != CALL:
        names["mask"] = torch.ones(1, 6, dtype=torch.bool)
    if "states" in code:  # Linear attention has a state of this name, and takes q, k and v.
        names["attn"] = pa.Linear()
    if library == "mamba-ssm" and "mamba2" in code:
        names |= {"x": torch.randn(1, 6, 2, 4), "dt": torch.rand(1, 6, 2), "A": -torch.rand(2)}
        names |= {"B": names["q"], "C": names["k"]}
    names["hidden_states"] = names["inputs_q"] = names["x"]
    if name == "pixel_values":
        from precondattn.layers.torch import VisionTransformer

        names["model"] = VisionTransformer(4, 2, 8, heads=2, blocks=1, classes=3)
    if library == "timm":
        run(code, names, ["VisionTransformer", "Block"])
    else:
        run(code, names, ["Decoder"] if place == MODEL else ["Attention", "Block", "Decoder"])


@pytest.mark.parametrize(
    "expression",
    ["linear", "gla", "hgrn2", "gated_delta", "kda", "ssd", "delta_product", "ccq(gated_delta)"],
)
def test_the_code_for_states_has_the_inputs_of_the_mechanism_and_runs(expression):
    attn = pa.parse(expression)
    inputs = make_inputs(attn, CallLayout("foreign", b=1, t=4, s=4, h=2, n=2, d=4, e=4), "random")
    _, cache = attn.extend(attn.init_cache(**inputs), **inputs)
    names = {"attn": attn, **inputs, "initial_state": cache.states["S"]}
    for name in ("initial_state", "output_final_state", "past_key_values"):
        with pytest.raises(TypeError) as caught:
            attn(**inputs, **{name: None})
        code = re.search(r"here: (.*)\); ", str(caught.value))[1]
        ran = dict(names)
        exec(code, ran)
        if name == "output_final_state":
            np.testing.assert_array_equal(ran["final_state"], names["initial_state"])
        elif name == "initial_state":
            assert not np.array_equal(ran["cache"].states["S"], names["initial_state"])


@pytest.mark.parametrize("name", PLACES)
def test_a_name_of_another_module_is_answered_with_its_module(name):
    pytest.importorskip("torch")
    assert f"{name!r}; import it from {PLACES[name][0]}" in missing_attribute(name)
    for module in PLACES[name]:
        if module.endswith((".flax", ".jax")):
            pytest.importorskip("flax")
        if module.endswith("transformers"):
            pytest.importorskip("transformers")
        assert hasattr(importlib.import_module(module), name)


def test_a_layer_is_imported_from_the_package_of_its_library():
    with pytest.raises(ImportError, match=r"import Attention from precondattn\.layers\.torch or "):
        from precondattn.layers import Attention  # noqa: F401


@pytest.mark.parametrize("name", OF_CALLS)
def test_what_a_layer_takes_at_another_place_is_said_in_code_that_runs(name):
    torch = pytest.importorskip("torch")
    in_layer, in_model = OF_CALLS[name]
    for said, layers in (
        (in_layer, ["Attention", "VisionTransformer"]),
        (of_each_layer(in_model), ["Decoder"]),
    ):
        names = {**arguments_here(), "mask": torch.ones(1, 6).bool(), "depth": 2}
        names |= {"key_mask": names["mask"], "S": torch.zeros(1, 2, 4, 4), "attn": pa.Linear()}
        names["cache"] = names["layer"].init_cache(1, capacity=9)
        names["caches"] = names["model"].init_caches(1, capacity=9)
        run(said.code, names, layers)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"window": 3}, "(an option of the mechanism: mechanism='lucid(softmax[window=3])')"),
        ({"eps": 0.5}, "(an option of the mechanism: mechanism='lucid[eps=0.5]')"),
        ({"key_mask": 1}, "(here: layer(x, mask=key_mask))"),
    ],
)
def test_a_layer_says_where_an_option_of_its_mechanism_is_given(arguments, text):
    pytest.importorskip("torch")
    from precondattn.layers.torch import Attention

    refuses(lambda: Attention(4, heads=1, mechanism="lucid", **arguments), TypeError, text)
    refuses(
        lambda: Attention(4, heads=1, mechanism=pa.Lucid), TypeError, "; write mechanism='lucid'"
    )
    refuses(lambda: Attention(4, 2), TypeError, "by name, as heads=; found Attention(4, 2)")


def test_the_names_are_those_that_the_libraries_have():
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import flex_attention

    def parameters(*functions):
        return {name for f in functions for name in inspect.signature(f).parameters}

    of_torch = torch.nn.functional.scaled_dot_product_attention.__doc__.partition(" -> ")[0]
    multihead = torch.nn.MultiheadAttention
    has = {
        "PyTorch's scaled_dot_product_attention": set(re.findall(r"\w+", of_torch)),
        "PyTorch's FlexAttention": parameters(flex_attention),
        "PyTorch's MultiheadAttention": parameters(multihead.__init__, multihead.forward),
    }
    ours = {"scale", "bias", "device", "dtype", "self"}
    answered = {name for answers in KEYWORDS.values() for name in answers}
    assert parameters(flex_attention) - ours <= answered
    for library, names in has.items():
        assert KEYWORDS[library].keys() <= names, library


def test_no_keyword_has_two_answers():
    names = [name for answers in KEYWORDS.values() for name in answers]
    assert len(names) == len(set(names))


def missing_attribute(name):
    """The error of an attribute that the package has not."""
    with pytest.raises(AttributeError) as caught:
        getattr(pa, name)
    return str(caught.value)


FOREIGN = [(name, text) for text, names in MECHANISMS.items() for name in names]


@pytest.mark.parametrize(("name", "text"), FOREIGN)
def test_a_mechanism_by_another_name_is_answered_with_its_expression(name, text):
    pa.parse(text)
    assert name not in pa.mechanisms()
    for other in (name, name.upper(), name.replace("_", "-"), name.replace("_", "")):
        message = f"unknown mechanism {other!r}; here it is {text!r}"
        refuses(lambda: pa.parse(other), ValueError, message)  # noqa: B023
        refuses(lambda: pa.parse(f"lucid({other})"), ValueError, message)  # noqa: B023
    if not hasattr(pa, name):
        assert f"{name!r}; here it is pa.parse({text!r})" in missing_attribute(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chunk_gated_delta_rule", "gated_delta"),
        ("fused_recurrent_gla", "gla"),
        ("parallel_forgetting_attn", "softmax[forget=unscaled]"),
        ("chunk_kda", "kda"),
        ("naive_chunk_linear_attn", "linear"),
        ("GatedDeltaNet", "gated_delta"),
        ("Gated DeltaNet", "gated_delta"),
        ("retention_attn", "retention"),
    ],
)
def test_functions_and_titles_of_others_are_answered_with_the_expression(name, text):
    refuses(lambda: pa.parse(name), ValueError, repr(text))


@pytest.mark.parametrize("name", ABSENT)
def test_a_mechanism_that_is_not_here_is_answered_with_one_near_it(name):
    near = ABSENT[name].expression
    pa.parse(near)
    message = f"{ABSENT[name].why}, and is not here; near it is {near!r}, and docs/write_a_mech"
    assert name not in pa.mechanisms()
    refuses(lambda: pa.parse(name), ValueError, message)
    refuses(lambda: pa.parse(f"lucid({name.upper()}_attn)"), ValueError, message)
    assert message in missing_attribute(name)


def test_every_remark_is_of_a_foreign_name():
    assert REMARKS.keys() <= {name for name, _ in FOREIGN}
    refuses(lambda: pa.parse("mamba2"), ValueError, "here it is 'ssd' (pa.mamba2 takes x, dt")
    assert "is pa.parse('ssd') (pa.mamba2 takes x, dt" in missing_attribute("mamba_2")
    assert missing_attribute("LUCID").endswith("'LUCID'; here it is pa.Lucid() or pa.lucid")
    assert missing_attribute("nothing").endswith("has no attribute 'nothing'")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("lucid[eps=0.001", "lucid[eps=0.001]"),
        ("lucid[eps=0.001)", "lucid[eps=0.001]"),
        ("lucid(laser", "lucid(laser)"),
        ("lucid(laser))", "lucid(laser)"),
        ("lucid(eps=0.001)", "lucid[eps=0.001]"),
        ("lucid{eps=0.001}(laser)", "lucid[eps=0.001](laser)"),
        ("lucid[eps: 0.001]", "lucid[eps=0.001]"),
        ("softmax(causal=False)", "softmax[causal=false]"),
        ("softmax[window=3,causal=False]", "softmax[causal=false,window=3]"),
        ("Lucid(Laser)", "lucid(laser)"),
        ("pa.Lucid(pa.Laser())", "lucid(laser)"),
        ("CCQ[eps=0.5](GDN)", "ccq[eps=0.5](gated_delta)"),
        ("qk-norm[norm=l2](Gated-Delta)", "qk_norm[norm=l2](gated_delta)"),
        ("lucid + laser", "lucid(laser)"),
        ("lucid, laser", "lucid(laser)"),
        ("ccq -> DeltaNet", "ccq(delta)"),
    ],
)
def test_text_that_is_no_expression_is_answered_with_the_one_that_was_meant(text, meant):
    assert str(pa.parse(meant)) == meant
    refuses(lambda: pa.parse(text), ValueError, f"\ndid you mean {meant!r}?")


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        case(
            "text as a base",
            "lucid: base must be a mechanism; found 'laser'; write pa.parse('lucid(laser)')",
            lambda: pa.Lucid("laser"),
            TypeError,
        ),
        *(
            case(
                f"{getattr(given, '__name__', given)} as a base",
                "; write pa.parse('lucid(laser)')",
                run,
                TypeError,
            )
            for given in ("Laser", "lucid(laser)", pa.Laser, pa.laser)
            for run in (lambda given=given: pa.Lucid(given), lambda given=given: pa.lucid(given))
        ),
        case(
            "a preconditioner within a base",
            "gated_delta: takes no base; found ccq; write pa.parse('ccq(gated_delta)')",
            lambda: pa.GatedDelta(pa.CCQ()),
            TypeError,
        ),
        case(
            "a class in the place of arrays, the other way round",
            "write lucid(laser)",
            lambda: pa.laser(pa.Lucid),
            TypeError,
        ),
        case(
            "a mechanism to parse",
            "found the mechanism lucid, which needs no parse",
            lambda: pa.parse(pa.Lucid()),
            TypeError,
        ),
        case(
            "gates by position",
            "the others by name, as in (q, k, v, g=g, beta=beta); found 5 by position",
            lambda: pa.gated_delta(Q, K, V, 1, 1),
            TypeError,
        ),
        case(
            "a mask of two axes",
            "; write attn_mask[None, None]",
            lambda: pa.softmax(Q, K, V, attn_mask=np.ones((4, 4), bool)),
        ),
        case(
            "a mask for each sequence",
            "; write attn_mask[:, None]",
            lambda: pa.softmax(Q, K, V, attn_mask=np.ones((2, 4, 4), bool)),
        ),
        case(
            "a mask of numbers",
            "what is added to scores is bias, as in pa.softmax(q, k, v, bias=attn_mask)",
            lambda: pa.softmax(Q, K, V, attn_mask=np.zeros((1, 1, 4, 4))),
            TypeError,
        ),
        case(
            "a mask of integers",
            "found int64; where 0 is masked, write key_mask != 0",
            lambda: pa.softmax(Q, K, V, key_mask=np.ones((2, 4), np.int64)),
            TypeError,
        ),
        *(
            case(
                f"arrays for {cls.name}",
                f"{cls.name}: a mechanism is built from options, and then called on arrays, as in "
                f"{cls.__name__}()(q, k, v); found an array of shape (2, 4, 2, 3)",
                run,
                TypeError,
            )
            for cls, run in (
                (pa.Lucid, lambda: pa.Lucid(Q, K, V)),
                (pa.Laser, lambda: pa.Laser(Q, K, V)),
                (pa.Softmax, lambda: pa.Softmax(q=Q, k=K, v=V)),
            )
        ),
        case(
            "option of the base",
            "unknown option 'window' (it belongs to the base: pa.Lucid(pa.Softmax(window=3)))",
            lambda: pa.Lucid(window=3),
            TypeError,
        ),
        case(
            "option of the base in an expression",
            "(it belongs to the base: lucid(softmax[window=3]))",
            lambda: pa.parse("lucid[window=3]"),
        ),
        case(
            "option in a call",
            "'causal' (an option, which is set before the call: pa.Softmax(causal=False))",
            lambda: pa.Lucid()(Q, K, V, causal=False),
            TypeError,
        ),
        case(
            "the other way round", "write lucid(laser)", lambda: pa.parse("laser(lucid)"), TypeError
        ),
        case(
            "a base around another",
            "takes no base (did you mean 'ccq(gated_delta)'?)",
            lambda: pa.parse("gated_delta(ccq)"),
        ),
    ],
)
def test_a_slip_of_the_first_hour_is_answered(run, error, text):
    refuses(run, error, text)


def heads_first(*heads, tokens=16):
    return [np.zeros((2, h, tokens, 4)) for h in heads]


EXCHANGED = "exchanged: here the layout is (b, t, h, d), and not (b, h, t, d)"


@pytest.mark.parametrize(
    ("name", "arrays", "named", "which"),
    [
        ("softmax", heads_first(8, 2, 2), {}, "q, k, v"),
        ("delta", heads_first(8, 8, 8), {"beta": np.zeros((2, 16, 8))}, "q, k, v"),
        ("deltaformer", heads_first(8, 2, 2), {"beta": np.zeros((2, 8, 16))}, "q, k, v, beta"),
    ],
)
def test_arrays_with_heads_before_tokens_are_recognised_where_shapes_show_it(
    name, arrays, named, which
):
    mechanism = pa.parse(name)
    with pytest.raises(pa.ShapeError) as caught:
        mechanism(*arrays, **named)
    assert (f"axes 1 and 2 of {which} {EXCHANGED}" in str(caught.value)) == bool(which)
    assert (EXCHANGED in str(caught.value)) == bool(which)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("key_mask", np.ones((2, 16), bool)),
        ("segment_ids", np.zeros((2, 16), int)),
        ("attn_mask", np.ones((1, 1, 16, 16), bool)),
    ],
)
def test_a_mask_shows_that_arrays_have_heads_before_tokens(name, mask):
    arrays = heads_first(8, 8, 8)
    text = f"; {name} fits with the axes 1 and 2 of q, k, v {EXCHANGED}"
    refuses(lambda: pa.softmax(*arrays, **{name: mask}), pa.ShapeError, text)
    pa.softmax(*(x.swapaxes(1, 2) for x in arrays), **{name: mask})
    with pytest.raises(pa.ShapeError, match=r"found \(2, \d+\)$"):
        pa.softmax(*arrays, key_mask=np.ones((2, 15), bool))


def test_other_shapes_that_disagree_are_not_taken_for_them():
    q, k, v = np.zeros((3, 2, 16, 8, 4))
    for arrays in ((q, k[:, :15], v[:, :15]), (q, k[:, :, :3], v[:, :, :3]), (q, k, v[:, :, :7])):
        with pytest.raises(pa.ShapeError) as caught:
            SOFTMAX(*arrays)
        assert "exchanged" not in str(caught.value)
