"""A mechanism in models of many families: outputs, gradients, options of the model, refusals."""

import copy
from pkgutil import resolve_name
from unittest.mock import DEFAULT, Mock

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import or_masks

import precondattn as pa
from precondattn.integrations.transformers import (
    replace_attention,
    restore_attention,
    static_cache,
)
from precondattn.integrations.transformers.attention import NAME
from precondattn.integrations.transformers.interface import (
    bidirectional_mask_function,
    causal_mask_function,
)
from precondattn.integrations.transformers.masks import masks_of, traced_sequences
from precondattn.layers.torch import Attention
from tests.integrations.transformers.small_models import FAMILIES, SIZES, model_of, prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_gives_what_the_model_gives(family):
    ids, mask = prompts()
    model = model_of(family)
    with torch.no_grad():
        original = model(ids, attention_mask=mask).logits
        ours = replace_attention(model, "softmax")(ids, attention_mask=mask).logits
    valid = mask.bool()
    torch.testing.assert_close(ours[valid], original[valid], rtol=1e-5, atol=2e-6)


def test_the_perplexity_of_softmax_is_that_of_the_model():
    model = model_of(dtype=torch.float64)
    ids = prompts()[0][:1].repeat(1, 5)
    with torch.no_grad():
        original = model(ids, labels=ids).loss.exp()
        ours = replace_attention(model, "softmax")(ids, labels=ids).loss.exp()
    assert abs(ours / original - 1) < 1e-6


def gradients_of(model, ids, **masks):
    model(ids, **masks).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_of_softmax_are_those_of_the_model_in_a_padded_batch():
    ids, mask = prompts()
    given = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    original, model = model_of(dtype=torch.float64), model_of(dtype=torch.float64)
    original.set_attn_implementation("sdpa")
    expected = gradients_of(original, ids, **given)
    found = gradients_of(replace_attention(model, "softmax"), ids, **given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
def test_gradients_of_softmax_are_those_of_a_model_with_a_window_a_cap_or_sinks(family):
    ids, _ = prompts()
    expected = gradients_of(model_of(family), ids, labels=ids)
    found = gradients_of(replace_attention(model_of(family), "softmax"), ids, labels=ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def attention_by_hand(module, query, key, value, mask, scaling=None, dropout=0.0, **others):
    """LUCID with dense matrices: y = (I + stril Φ)⁻¹ v, for sequences without padding."""
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    t, d = query.shape[2:]
    unit = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6)
    phi = torch.exp(scaling * (unit @ unit.mT - d)).tril(-1)
    y = torch.linalg.solve_triangular(phi + torch.eye(t, dtype=k.dtype), v, upper=False)
    scores = scaling * query @ k.mT
    causal = torch.ones(t, t, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    return (weights @ y).transpose(1, 2), None


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Granite"])
def test_lucid_is_lucid_with_the_model_s_rotation_and_scale(family, monkeypatch):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    ids, _ = prompts()
    model = model_of(family, dtype=torch.float64)
    with torch.no_grad():
        ours = replace_attention(model, "lucid")(ids).logits
        restore_attention(model)
        monkeypatch.setitem(functions._local_mapping, "eager", attention_by_hand)
        by_hand = model(ids).logits
    torch.testing.assert_close(ours, by_hand, rtol=1e-6, atol=1e-8)


def test_layers_have_mechanisms_of_their_own():
    ids, _ = prompts()
    with torch.no_grad():
        both, first, last, none = (
            replace_attention(model_of(), layers=layers)(ids).logits
            for layers in (
                ["lucid"] * 2,
                ["lucid", "softmax"],
                ["softmax", "lucid"],
                ["softmax"] * 2,
            )
        )
    for one, other in ((both, first), (both, last), (first, last), (first, none)):
        assert (one - other).abs().max() > 0.01
    model = replace_attention(model_of(), layers=["laser", pa.Lucid()])
    assert [str(m.precondattn.mechanism.name) for m in attentions(model)] == ["laser", "lucid"]


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def test_a_window_a_cap_and_a_sink_stay():
    model = replace_attention(model_of("Gemma2"), "lucid")
    local, whole = (m.precondattn.mechanism.base for m in attentions(model))
    assert (local.window, whole.window) == (5, None)
    assert local.softcap == 50.0
    assert local.scale == 0.25
    model = replace_attention(model_of("GptOss"), "lucid")
    assert [m.precondattn.mechanism.base.sink for m in attentions(model)] == [True, True]


def test_a_temperature_is_a_parameter_and_trains():
    ids, _ = prompts()
    model = model_of()
    plain = model(ids).logits
    replace_attention(model, "temperature[per=head](lucid)")
    tau = attentions(model)[0].mechanism_inputs.tau
    assert tau.shape == (4,)
    tempered = model(ids, labels=ids)
    replace_attention(model, "lucid")
    torch.testing.assert_close(tempered.logits, model(ids).logits, rtol=1e-5, atol=2e-6)
    tempered.loss.backward()
    assert tau.grad.abs().min() > 0
    assert not any("mechanism_inputs" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(restore_attention(model)(ids).logits, plain)


def test_packed_position_ids_are_sequences_of_their_own():
    ids, _ = prompts()
    model = replace_attention(model_of("Mistral"), "lucid")
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(ids[:1], position_ids=positions, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in (ids[:1, :4], ids[:1, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mechanism", ["softmax", "lucid", "laser"])
def test_padding_changes_nothing(side, mechanism):
    ids = prompts()[0][:1]
    model = replace_attention(model_of(), mechanism)
    padding = torch.full((1, 3), 5)
    parts, zeros = [padding, ids], torch.zeros(1, 3)
    masks = [zeros, torch.ones(1, 11)]
    if side == "right":
        parts, masks = parts[::-1], masks[::-1]
    mask = torch.cat(masks, 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids).logits
        padded = model(torch.cat(parts, 1), attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[mask.bool()], alone[0], rtol=1e-5, atol=2e-6)


def test_checkpointing_gives_the_same_gradients():
    ids, _ = prompts()
    gradients = []
    for checkpointing in (False, True):
        model = replace_attention(model_of(dtype=torch.float64), "lucid(laser)").train()
        if checkpointing:
            # Named anew in 5.23.
            for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
                if hasattr(model, name):
                    getattr(model, name)()
                    break
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(attentions(model)[0].k_proj.weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_copy_is_a_model_of_its_own_and_files_have_the_model_s_weights(tmp_path):
    ids, _ = prompts()
    model = replace_attention(model_of(), "lucid")
    copied = copy.deepcopy(model)
    restore_attention(model)
    assert copied.config._attn_implementation == NAME
    with torch.no_grad():
        expected = copied(ids).logits
        copied.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert loaded.config._attn_implementation != NAME
        torch.testing.assert_close(replace_attention(loaded, "lucid")(ids).logits, expected)


def test_added_parameters_are_saved_and_loaded_after_the_model(tmp_path):
    model = replace_attention(model_of(), "temperature[per=head]")
    with torch.no_grad():
        for module in attentions(model):
            module.mechanism_inputs.tau.normal_()
    model.save_pretrained(tmp_path)
    loaded = replace_attention(model_of(), "temperature[per=head]")
    weights = load_file(tmp_path / "model.safetensors")
    assert not loaded.load_state_dict(weights).missing_keys
    ids, _ = prompts()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


REFUSED = {
    "linear": "is not softmax",
    "path": "is not softmax",
    "ccq": "depends on the tokens",
    "differential": "depends on the tokens",
    "lucid[beta=true]": "depends on the tokens",
    "softmax[causal=false]": "is not",
    "softmax[scale=2]": "scale: the mechanism has 2",
    "softmax[bias=true]": "depends on the tokens",
}


@pytest.mark.parametrize("mechanism", REFUSED)
def test_a_mechanism_that_does_not_fit_is_refused_and_the_model_unchanged(mechanism):
    model = model_of()
    with pytest.raises((TypeError, ValueError), match=REFUSED[mechanism]):
        replace_attention(model, mechanism)
    assert model.config._attn_implementation == "eager"
    assert not hasattr(attentions(model)[0], NAME)


def test_what_a_model_has_and_a_mechanism_has_not_is_refused():
    with pytest.raises(TypeError, match=r"sink=true.*laser needs a base that reads a mean"):
        replace_attention(model_of("GptOss"), "laser")
    with pytest.raises(ValueError, match="window: the mechanism has 3, and the model 5"):
        replace_attention(model_of("Mistral"), "softmax[window=3]")
    config = DiffLlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    with pytest.raises(TypeError, match="differential already"):
        replace_attention(DiffLlamaForCausalLM(config), "lucid")
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(TypeError, match="a causal decoder or an encoder expected"):
        replace_attention(t5, "lucid")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        replace_attention(torch.nn.Linear(2, 2), "lucid")
    config = Mamba2Config(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_heads=4, head_dim=4, state_size=4
    )
    with pytest.raises(TypeError, match="has 0, and for other layers Transformers has no interf"):
        replace_attention(Mamba2ForCausalLM(config), "lucid")
    llama = model_of()
    llama._supports_attention_backend = False
    with pytest.raises(TypeError, match="each of 2 layers expected; LlamaForCausalLM has 0"):
        replace_attention(llama, "lucid")


def attributes_of(model):
    return [model.config._attn_implementation] + [
        (type(m), {n: [*v] if isinstance(v, dict) else id(v) for n, v in vars(m).items()})
        for m in model.modules()
    ]


@pytest.mark.parametrize(
    "change", [lambda m: replace_attention(m, "temperature"), restore_attention]
)
def test_a_change_that_is_interrupted_at_the_second_layer_is_undone(change, monkeypatch):
    model = replace_attention(model_of(), "temperature[per=head]")
    before, path = attributes_of(model), f"{replace_attention.__module__}._forget"
    works_once = Mock(wraps=resolve_name(path), side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(path, works_once)
    with pytest.raises(KeyboardInterrupt):
        change(model)
    assert attributes_of(model) == before


def test_arguments_are_checked():
    model = model_of()
    for wrong, message in (
        ({}, "mechanism or layers"),
        ({"mechanism": "lucid", "layers": ["lucid"] * 2}, "not both"),
        ({"layers": "lucid"}, "found the text"),
        ({"mechanism": 3}, "found 3"),
    ):
        with pytest.raises(TypeError, match=message):
            replace_attention(model, **wrong)
    with pytest.raises(ValueError, match="2 mechanisms expected, one a layer; found 1"):
        replace_attention(model, layers=["lucid"])
    with pytest.raises(ValueError, match="has not been replaced"):
        restore_attention(model)


def test_print_shows_the_mechanism_of_each_layer_until_it_is_restored():
    model = model_of()
    before = str(model)
    replace_attention(model, layers=["softmax", "lucid"])
    replace_attention(model, layers=["lucid(laser)", "lucid"])
    shown = str(copy.deepcopy(model))
    assert shown.count("mechanism=") == 2
    assert shown.index("mechanism='lucid(laser") < shown.index("mechanism='lucid(softmax")
    assert str(restore_attention(model)) == before


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_boolean_mask_of_pairs_gives_what_the_model_gives(family):
    ids, _ = prompts()
    model, t = model_of(family), ids.shape[1]
    model.set_attn_implementation("sdpa")
    own = (torch.rand(2, 1, t, t) > 0.4).tril() | torch.eye(t, dtype=torch.bool)
    window = getattr(model.config, "sliding_window", None)
    if window:
        own &= torch.ones(t, t, dtype=torch.bool).triu(1 - window)
    with torch.no_grad():
        expected = model(ids, attention_mask=own, use_cache=False).logits
        model = replace_attention(model, "softmax")
        found = model(ids, attention_mask=own, use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
        if window:
            return  # The cache of a window refuses it.
        for cache in (transformers.DynamicCache(), static_cache(model, t + 3)):
            parts = []
            for start, stop in ((0, 5), (5, 9), (9, t)):
                mask = own[:, :, start:stop, :stop]
                given = {"attention_mask": mask, "past_key_values": cache}
                parts.append(model(ids[:, start:stop], **given).logits)
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=2e-6)


def test_a_mask_of_pairs_that_is_no_restriction_of_the_pattern_is_refused(monkeypatch):
    ids, _ = prompts()
    model, t = replace_attention(model_of(), "softmax"), ids.shape[1]
    everything = torch.ones(2, 1, t, t, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"where softmax.* does not, whose pattern is causal"):
        model(ids, attention_mask=everything)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="has to be read, which compiled code does not do"):
        masks_of(everything.tril(), pa.Softmax(), 0, t)


def test_what_a_call_asks_for_and_a_mechanism_has_not_is_refused():
    ids, _ = prompts()
    model = replace_attention(model_of(attention_dropout=0.1), "lucid")
    with pytest.raises(ValueError, match="dropout"):
        model.train()(ids)
    model.eval()
    model(ids)
    causal = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="takes no attn_mask: lucid's triangular solve"):
        model(ids, attention_mask=causal)
    with pytest.raises(ValueError, match=r"a boolean mask of your own .* found .* torch.float32"):
        model(ids, attention_mask=causal.float())
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)
    restore_attention(model)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="call replace_attention"):
        model(ids)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_replaced_model_is_one_graph_without_a_mask_too(family):
    """Compiled code does not see whether position_ids are those of one sequence."""
    model = replace_attention(model_of(family, num_hidden_layers=1).eval(), "lucid")
    ids, mask = prompts()
    packed = torch.arange(ids.shape[1])[None] % 3
    for given in ({}, {"position_ids": packed}, {"attention_mask": mask}):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = compiled(ids, use_cache=False, **given).logits
        expected = model(ids, use_cache=False, **given).logits
        torch.testing.assert_close(found, expected, msg=str(given))


def test_a_pattern_that_no_mechanism_has_is_refused_in_compiled_code_too():
    index = torch.arange(4)
    for pattern in (bidirectional_mask_function, or_masks(causal_mask_function, lambda *_: True)):
        with pytest.raises(ValueError, match="neither causal nor a causal sliding"):
            traced_sequences(pattern, 1, index)


@pytest.mark.thorough
def test_compiled_calls_with_new_caches_warn_of_nothing():
    """Warnings are errors here, and Dynamo warns of an `lru_cache` that it passes over."""
    torch._dynamo.reset()
    for mechanism in ("ccq(gated_delta)", "softmax[window=3]"):
        attn = Attention(24, heads=4, mechanism=mechanism)

        def prefill(x, attn=attn):
            return attn(x, cache=attn.init_cache(2, 8))[0]

        x = torch.randn(2, 5, 24)
        compiled = torch.compile(prefill, backend="eager")
        torch.testing.assert_close(compiled(x), attn(x), rtol=1e-4, atol=1e-5)
