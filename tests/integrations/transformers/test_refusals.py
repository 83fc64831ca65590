"""What models of Transformers refuse, and that the calls which a message advises work."""

import re
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")

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
    static_cache,
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
    ({"mechanism": 3}, TypeError, "mechanism must be a text or a mechanism; found 3"),
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
    ({"layer_types": []}, TypeError, "layer_types must be a list"),
    ({"layer_types": ["gla", {"heads": 2}]}, TypeError, "mechanism must be a text or a mech"),
    (
        {"attention_arguments": {"gla": {"heads": 2}}},
        ValueError,
        "no layer is 'gla'; .* softmax",
    ),
    ({"attention_arguments": {"softmax": {"head": 2}}}, ValueError, "'head' of softmax is none"),
    ({"attention_arguments": {"softmax": 2}}, TypeError, "must be a dict of dicts"),
    ({"mechanism": "gla", "num_key_value_heads": 3}, ValueError, "kv_heads must divide heads"),
    ({"mechanism": "delta", "num_key_value_heads": 2}, ValueError, "kv_heads: delta has"),
    ({"mechanism": "gla", "num_slots": 2}, ValueError, "slots: gla has none"),
    ({"mechanism": "gla", "head_dim": None, "hidden_size": 30}, ValueError, "4 query heads"),
    ({"mlp": "relu"}, ValueError, "mlp must be 'gated' or 'plain'; found 'relu'"),
    ({"mechanism": "gla", "recipes": {"q": 1}}, TypeError, "recipes: that of q must be one"),
    ({"mechanism": "gla", "recipes": {"a": Rotary()}}, ValueError, "no input 'a'"),
    ({"mechanism": "gla", "recipes": {"q": {"recipe": "os"}}}, ValueError, "found 'os'"),
    (
        {"mechanism": "gla", "recipes": {"q": {"recipe": "Rotary", "base": 1}}},
        ValueError,
        "Rotary has no option 'base'; it has bias, theta, fraction",
    ),
    ({"mechanism": "lucid", "recipes": {"q": Own()}}, TypeError, "can store; found Own"),
    *(
        ({name: 0.1}, TypeError, f"{name}: no mechanism drops weights")
        for name in ("attention_dropout", "dropout", "resid_pdrop")
    ),
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
    "path": "is not softmax",
    "ccq": "depends on the tokens",
    "differential": "depends on the tokens",
    "lucid[beta=true]": "depends on the tokens",
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
    (lambda: (model_of(), 3), TypeError, "found 3"),
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


class ModelAdvice(NamedTuple):
    """What a message advises, and a call that is refused (True) or does what it says (False)."""

    says: str
    call: object


def ours(mechanism="lucid", family="Llama", **options):
    return replace_attention(model_of(family, **options), mechanism)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def after(of, cache, ids=IDS, **options):
    return of(ids, past_key_values=cache, **options).logits


def with_the_same_mask(refused):
    """The last three tokens after a prompt with padding at the left."""
    of, cache = ours(), DynamicCache()
    of(IDS[:, :8], attention_mask=MASK[:, :8], past_key_values=cache)
    mask = torch.ones_like(MASK) if refused else MASK
    positions = (MASK.cumsum(1) - 1).clamp(min=0)[:, 8:]
    return after(of, cache, IDS[:, 8:], attention_mask=mask, position_ids=positions)


def cropped(refused):
    of, cache = ours("softmax", family="Mistral"), DynamicCache()
    of(IDS[:, :8], past_key_values=cache)
    if not refused:
        cache.activate_past_recording()
    of(IDS[:, 8:], past_key_values=cache)
    cache.crop(-3)
    close(after(of, cache, IDS[:, 8:]), of(IDS, use_cache=False).logits[:, 8:])


def static_window(refused):
    of = ours(family="Mistral")
    cache = {} if refused else {"past_key_values": static_cache(of, 24)}
    options = {"max_new_tokens": 2, "do_sample": False}
    found = of.generate(IDS, **(cache or {"cache_implementation": "static"}), **options)
    assert torch.equal(found, of.generate(IDS, use_cache=False, **options))


def offloaded(refused):
    of = ours()
    cache = DynamicCache(config=of.config)
    cache.offloading = refused
    close(after(of, cache), of(IDS, use_cache=False).logits)


def kept_from_before(refused):
    cache = DynamicCache()
    if refused:
        model_of()(IDS[:, :8], past_key_values=cache)
    close(after(ours(), cache), ours()(IDS, use_cache=False).logits)


def by_name_only(refused):
    of = model_of()
    if refused:
        of.set_attn_implementation(NAME)
    else:
        replace_attention(of, "lucid")
    return of(IDS)


def with_gradients_and_a_static_cache(refused):
    with torch.enable_grad():
        after(ours(), DynamicCache()).sum().backward()
    with torch.set_grad_enabled(refused):
        of = ours()
        found = after(of, StaticCache(of.config, max_cache_len=16))
        close(found, of(IDS, use_cache=False).logits)


ADVICE = [
    ModelAdvice(
        "set attention_dropout, or attention_probs_dropout_prob, to 0 in the model's config",
        lambda refused: ours(attention_dropout=0.1 * refused).train()(IDS, use_cache=False),
    ),
    ModelAdvice("call replace_attention(model, ...)", by_name_only),
    ModelAdvice("an offloaded cache moves copies", offloaded),
    ModelAdvice("use one without offloading", offloaded),
    ModelAdvice("begin with an empty one after replace_attention", kept_from_before),
    ModelAdvice("call activate_past_recording() before the tokens that may be removed", cropped),
    ModelAdvice("pass the same mask with columns for the new tokens appended", with_the_same_mask),
    ModelAdvice("pass past_key_values=static_cache(model, max_cache_len)", static_window),
    ModelAdvice("use a DynamicCache, or torch.no_grad()", with_gradients_and_a_static_cache),
    ModelAdvice(
        "such as 'lucid' or 'lucid(laser)'",
        lambda refused: [ours(name) for name in ("lucid", "linear" if refused else "lucid(laser)")],
    ),
]


@pytest.mark.parametrize("advice", ADVICE, ids=[advice.says for advice in ADVICE])
@torch.no_grad()
def test_a_call_that_a_refusal_advises_works(advice):
    with pytest.raises((TypeError, ValueError), match=re.escape(advice.says)):
        advice.call(True)
    advice.call(False)
