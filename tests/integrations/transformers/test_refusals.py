"""What models of Transformers refuse, and what a message advises instead."""

import re

import pytest

pytest.importorskip("transformers")

import importlib
import sys

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, or_masks

import precondattn as pa
from precondattn.integrations.transformers import (
    PrecondattnCache,
    PrecondattnConfig,
    PrecondattnForCausalLM,
    replace_attention,
    restore_attention,
)
from precondattn.integrations.transformers.attention import NAME
from precondattn.integrations.transformers.masks import masks_of, traced_sequences
from precondattn.layers.recipes import Rotary
from tests.integrations.transformers.small_models import (
    HYBRID,
    OWN,
    SIZES,
    model,
    model_of,
    own_configuration,
    own_model,
    prompts,
)

IDS, MASK = prompts()
PAIRS = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()


class Own(Rotary):
    pass


CONFIGURATIONS = [
    ({"mechanism": "lucidd"}, ValueError, "lucid"),
    (
        {"sliding_window": 16},
        TypeError,
        r"has no effect \(here: window=, an option of softmax, as in 'softmax\[window=128\]'\)",
    ),
    ({"rope_theta": 1e6}, TypeError, r"recipes=\{x: Rotary\(theta=1e6\) for x in 'qk'\}"),
    ({"mechanism": "softmax[causal=false]"}, ValueError, "causal"),
    ({"mechanism": "gla", "layer_types": ["gla"]}, ValueError, "not both"),
    ({"layer_types": ["gla"] * 3}, ValueError, "each of the num_hidden_layers=2 .*found 3"),
    ({"layer_types": "gla"}, TypeError, "layer_types must be a list"),
    (
        {"attention_arguments": {"gla": {"heads": 2}}},
        ValueError,
        "no layer is 'gla'; .* softmax",
    ),
    ({"attention_arguments": {"softmax": {"head": 2}}}, ValueError, "'head' of softmax is none"),
    ({"mechanism": "gla", "num_key_value_heads": 3}, ValueError, "kv_heads must divide heads"),
    ({"mlp": "relu"}, ValueError, "mlp must be 'gated' or 'plain'; found 'relu'"),
    ({"mechanism": "gla", "recipes": {"q": 1}}, TypeError, "recipes: that of q must be one"),
    (
        {"mechanism": "gla", "recipes": {"q": {"recipe": "Rotary", "base": 1}}},
        ValueError,
        "Rotary has no option 'base'; it has bias, theta, fraction",
    ),
    ({"mechanism": "lucid", "recipes": {"q": Own()}}, TypeError, "can store; found Own"),
    ({"resid_pdrop": 0.1}, TypeError, "resid_pdrop: no mechanism drops weights"),
]


@pytest.mark.parametrize(("options", "error", "message"), CONFIGURATIONS)
def test_a_configuration_that_can_not_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        PrecondattnConfig(**{**OWN, **options})


def test_a_configuration_that_was_changed_is_checked_again():
    PrecondattnConfig(attention_dropout=0.0)
    config = own_configuration(layer_types=HYBRID)
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers=3 layers; found 2"):
        PrecondattnForCausalLM(config)


NO_FIT = {
    "linear": "is not softmax",
    "ccq": "depends on the tokens",
    "softmax[causal=false]": "is not",
    "softmax[scale=2]": "scale: the mechanism has 2",
    "softmax[bias=true]": "depends on the tokens",
}


@pytest.mark.parametrize("mechanism", NO_FIT)
def test_a_mechanism_that_does_not_fit_is_refused_and_the_model_unchanged(mechanism):
    llama = model_of()
    with pytest.raises((TypeError, ValueError), match=NO_FIT[mechanism]):
        replace_attention(llama, mechanism)
    assert llama.config._attn_implementation == "eager"
    assert not hasattr(llama.model.layers[0].self_attn, NAME)


def of_class(family, kind="ForCausalLM", **sizes):
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}{kind}")(config)


def without_interface():
    llama = model_of()
    llama._supports_attention_backend = False
    return llama


TINY = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}
T5 = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
MODELS = [
    (lambda: (model_of("GptOss"), "laser"), TypeError, "sink=true.*laser needs a base that reads"),
    (
        lambda: (model_of("Mistral"), "softmax[window=3]"),
        ValueError,
        "window: the mechanism has 3, and the model 5",
    ),
    (lambda: (of_class("DiffLlama", **SIZES), "lucid"), TypeError, "differential already"),
    (
        lambda: (of_class("T5", "ForConditionalGeneration", **T5), "lucid"),
        TypeError,
        "a causal decoder or an encoder expected",
    ),
    (lambda: (torch.nn.Linear(2, 2), "lucid"), TypeError, "PreTrainedModel"),
    (
        lambda: (of_class("Mamba2", **TINY, num_heads=4, head_dim=4, state_size=4), "lucid"),
        TypeError,
        "has 0, and for other layers Transformers has no interf",
    ),
    (lambda: (without_interface(), "lucid"), TypeError, "of 2 layers expected; LlamaForC.* has 0"),
    (lambda: (model_of(),), TypeError, "mechanism or layers"),
]


@pytest.mark.parametrize(("made", "error", "message"), MODELS)
def test_a_model_or_an_argument_that_does_not_fit_is_refused(made, error, message):
    with pytest.raises(error, match=message):
        replace_attention(*made())


def test_layers_are_checked():
    for layers, error, message in (
        ("lucid", TypeError, "found the text"),
        (["lucid"], ValueError, "2 mechanisms expected, one a layer; found 1"),
    ):
        with pytest.raises(error, match=message):
            replace_attention(model_of(), layers=layers)
    with pytest.raises(TypeError, match="not both"):
        replace_attention(model_of(), "lucid", layers=["lucid"] * 2)
    with pytest.raises(ValueError, match="has not been replaced"):
        restore_attention(model_of())


OF_PAIRS = "softmax + laser"
CALLS = [
    ("gla", {"attention_mask": MASK[:, :8]}, ValueError, r"shape \(2, 11\), a column"),
    ("gla", {"attention_mask": MASK * 0.5}, ValueError, "must have 1 for tokens"),
    ("gla", {"attention_mask": MASK.tolist()}, TypeError, "must be a tensor; found list"),
    ("gla", {"past_key_values": DynamicCache()}, TypeError, "PrecondattnCache.*found DynamicCache"),
    ("gla", {"inputs_embeds": torch.ones(2, 11, 24)}, ValueError, "input_ids or inputs_embeds"),
    ("gla", {"output_attentions": True}, ValueError, "never computed"),
    ("gla", {"cu_seq_lens_q": torch.tensor([0, 9])}, TypeError, "cu_seq_lens_q is no argument"),
    ("gla", {"token_type_ids": torch.ones(2, 11)}, TypeError, "token_type_ids is no argument"),
    ("gla", {"position_ids": torch.arange(11)[None] % 4}, ValueError, "packed"),
    ("gla", {"position_ids": torch.arange(11)}, ValueError, r"shape \(b, t\); found \(11,\)"),
    (OF_PAIRS, {"attention_mask": PAIRS + 0.0}, TypeError, r"boolean, True where .*torch.float32"),
    (
        OF_PAIRS,
        {"attention_mask": PAIRS[..., :4]},
        ValueError,
        r"\(2 or 1, heads or 1, 11, 11\), a column for each",
    ),
    (OF_PAIRS, {"attention_mask": PAIRS.mT}, ValueError, "whose pattern is causal"),
    (
        "softmax + gated_delta",
        {"prefix": torch.tensor([1, 2])},
        ValueError,
        "takes no prefix: gated_delta sums up all tokens",
    ),
]


@pytest.mark.parametrize(("layers", "options", "error", "message"), CALLS)
def test_a_call_of_our_model_that_can_not_be_is_refused(layers, options, error, message):
    with pytest.raises(error, match=message):
        model("own", layers)(IDS, **options)


@torch.no_grad()
def test_caches_of_our_model_that_can_not_be_are_refused():
    of = model("own", "lucid")
    cache, padded = PrecondattnCache(of.config), PrecondattnCache(model("own", OF_PAIRS).config)
    of(IDS, past_key_values=cache)
    model("own", OF_PAIRS)(IDS, attention_mask=MASK, past_key_values=padded)
    one_layer = own_model("lucid", num_hidden_layers=1)
    for call, error, message in (
        (
            lambda: of.generate(IDS, max_new_tokens=2, cache_implementation="quantized"),
            ValueError,
            "'dynamic' or 'static' for this model; found 'quantized'",
        ),
        (
            lambda: of.generate(IDS[:1], max_new_tokens=2, assistant_early_exit=1),
            ValueError,
            "assistant_early_exit: this model runs all layers",
        ),
        (
            lambda: one_layer(IDS, past_key_values=PrecondattnCache(of.config)),
            ValueError,
            "has 2 layers, and the model has 1",
        ),
        (lambda: PrecondattnCache(of.config, 0), ValueError, "capacity must be a whole number"),
        (lambda: of(IDS[:1], past_key_values=cache), ValueError, "2 sequences; found 1"),
        (lambda: cache.update(torch.ones(1), torch.ones(1), 0), TypeError, "filled by Precond"),
        (
            lambda: model("own", OF_PAIRS)(
                IDS[:, :1],
                attention_mask=torch.ones(2, 1, 1, 12, dtype=torch.bool),
                past_key_values=padded,
            ),
            ValueError,
            "can not follow padding in the cache",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    assert of.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        ("lucid", {"attention_mask": PAIRS}, "takes no attn_mask: lucid's triangular solve"),
        (
            "lucid",
            {"attention_mask": PAIRS + 0.0},
            r"a boolean mask of your own .* found .* torch.float32",
        ),
        ("lucid", {"output_attentions": True}, "output_attentions"),
        ("softmax", {"attention_mask": PAIRS | True}, r"softmax.* does not, whose pattern is caus"),
    ],
)
def test_what_a_call_asks_for_and_a_mechanism_has_not_is_refused(mechanism, options, message):
    with pytest.raises(ValueError, match=message):
        replace_attention(model_of(), mechanism)(IDS, **options)


def test_masks_that_compiled_code_can_not_read_are_refused(monkeypatch):
    index = torch.arange(4)
    for pattern in (bidirectional_mask_function, or_masks(causal_mask_function, lambda *_: True)):
        with pytest.raises(ValueError, match="neither causal nor a causal sliding"):
            traced_sequences(pattern, 1, index)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="has to be read, which compiled code does not do"):
        masks_of(PAIRS, pa.Softmax(), 0, 11)


def ours(mechanism="lucid", family="Llama", **options):
    return replace_attention(model_of(family, **options), mechanism)


def by_name_only():
    llama = model_of()
    llama.set_attn_implementation(NAME)
    llama(IDS)


def kept_from_before():
    cache = DynamicCache()
    model_of()(IDS, past_key_values=cache)
    ours()(IDS, past_key_values=cache)


def offloaded():
    cache = DynamicCache(config=ours().config)
    cache.offloading = True
    ours()(IDS, past_key_values=cache)


ADVICE = {
    "set attention_dropout, or attention_probs_dropout_prob, to 0 in the model's config": (
        lambda: ours(attention_dropout=0.1).train()(IDS, use_cache=False)
    ),
    "call replace_attention(model, ...)": by_name_only,
    "an offloaded cache moves copies": offloaded,
    "use one without offloading": offloaded,
    "begin with an empty one after replace_attention": kept_from_before,
    "pass past_key_values=static_cache(model, max_cache_len)": (
        lambda: ours(family="Mistral").generate(
            IDS, cache_implementation="static", max_new_tokens=2
        )
    ),
    "use a DynamicCache, or torch.no_grad()": (
        lambda: ours()(IDS, past_key_values=StaticCache(ours().config, max_cache_len=16))
    ),
    "such as 'lucid' or 'lucid(laser)'": lambda: ours("linear"),
}


@pytest.mark.parametrize("advice", ADVICE)
def test_a_refusal_says_what_to_do_instead(advice):
    with pytest.raises((TypeError, ValueError), match=re.escape(advice)):
        ADVICE[advice]()


PACKAGE = "precondattn.integrations.transformers"


def import_again(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module(PACKAGE)


def test_a_name_that_has_moved_is_named(monkeypatch):
    masks = importlib.import_module("transformers.masking_utils")
    monkeypatch.delattr(masks, "and_masks")
    with pytest.raises(ImportError, match="and_masks"):
        import_again(monkeypatch)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"precondattn\[transformers\]"):
        import_again(monkeypatch)
