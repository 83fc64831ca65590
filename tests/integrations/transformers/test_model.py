"""`PrecondattnForCausalLM`: all that Transformers does with a model."""

import copy
import json

import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
)

import precondattn as pa
from precondattn.cache import Cache
from precondattn.integrations.transformers import (
    PrecondattnCache,
    PrecondattnConfig,
    PrecondattnForCausalLM,
)
from precondattn.integrations.transformers.drafts import DraftRecording
from precondattn.layers.recipes import Rotary
from tests.layers.layer_cases import CAUSAL, sizes_for

VOCABULARY = 61
HYBRID = ("gated_delta", "lucid")
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 6,
}
KINDS = (
    "lucid",  # A cache of tokens, which can be cropped.
    "softmax[window=3]",  # A cache of the last tokens.
    "path",  # A cache of rows that later tokens rewrite.
    "gated_delta",  # A state.
    "ccq(gated_delta)",  # Two states.
    "differential(laser)",  # Two calls that share what is cached.
    "softmax[sink=true,window=3]",  # A parameter of the mechanism itself.
)
"""Mechanisms by what their cache holds. The layers of all are tested in `tests/layers`."""
MODES = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_p": 0.9},
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def configuration(mechanism=None, **options):
    """A small configuration with the odd sizes that the layers are tested with."""
    sizes = sizes_for(mechanism) if mechanism else {}
    odd = {
        "value_head_dim": sizes.get("value_dim"),
        "num_key_value_heads": sizes.get("kv_heads"),
        "num_value_heads": sizes.get("value_heads"),
        "num_slots": sizes.get("slots"),
    }
    return PrecondattnConfig(**{**SMALL, **odd, "mechanism": mechanism, **options})


def made(mechanism=None, **options):
    """A model whose logits are far apart, so that a wrong cache changes the text."""
    model = PrecondattnForCausalLM(configuration(mechanism, **options)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def prompts():
    """Two prompts (2, 9), and the mask of the first one's left padding."""
    ids, mask = torch.randint(1, VOCABULARY, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    return ids, mask


def written(model, ids, mask, **options):
    """Tokens and logits of a seeded `generate`."""
    torch.manual_seed(1)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_with_a_cache_a_model_writes_what_it_writes_without(mechanism):
    check_cache(made(mechanism), *prompts(), "greedy")


@pytest.mark.parametrize("mechanism", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_one_prompt_and_other_ways_to_choose_tokens_write_the_same_with_a_cache(mechanism, mode):
    model, (ids, mask) = made(mechanism), prompts()
    check_cache(model, ids[1:], mask[1:], mode)
    if mode != "greedy":
        check_cache(model, ids, mask, mode)


def check_cache(model, ids, mask, mode):
    cached = written(model, ids, mask, **MODES[mode])
    uncached = written(model, ids, mask, use_cache=False, **MODES[mode])
    assert cached.past_key_values.get_seq_length() == ids.shape[1] + 4
    assert cached.sequences.tolist() == uncached.sequences.tolist()
    for a, b in zip(cached.logits, uncached.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_prompt_with_padding_writes_what_it_writes_alone():
    model, (ids, mask) = made(layer_types=HYBRID), prompts()
    padded, alone = written(model, ids, mask), written(model, ids[:1, 4:], mask[:1, 4:])
    assert padded.sequences[0, 9:].tolist() == alone.sequences[0, 5:].tolist()


@pytest.mark.parametrize("mechanism", KINDS)
def test_a_saved_model_is_the_same_model(mechanism, tmp_path):
    model, (ids, mask) = made(mechanism), prompts()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert type(again) is PrecondattnForCausalLM
    assert torch.equal(again(ids, mask).logits, model(ids, mask).logits)


def test_a_configuration_is_json_with_options_and_recipes(tmp_path):
    slow = Rotary(theta=500_000.0)
    config = configuration(
        layer_types=[pa.parse("lucid[scale=0.5]"), "softmax"],
        attention_arguments={"softmax": {"recipes": {"q": slow}, "kv_heads": 2}},
    )
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["layer_types"] == ["lucid[scale=0.5]", "softmax"]
    assert stored["attention_arguments"]["softmax"]["recipes"]["q"]["theta"] == 500_000.0
    assert again.attention_arguments == config.attention_arguments
    layers = PrecondattnForCausalLM(again).model.layers
    assert layers[1].attention.plan == PrecondattnForCausalLM(config).model.layers[1].attention.plan
    assert "500000" in repr(layers[1].attention)


def test_a_plain_mlp_is_stored_and_read(tmp_path):
    model, (ids, mask) = PrecondattnForCausalLM(configuration("softmax", mlp="plain")), prompts()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(again.model.layers[0].mlp, "gate_proj")
    assert torch.equal(again(ids, mask).logits, model(ids, mask).logits)


def test_recipes_of_every_layer_are_stored_too(tmp_path):
    config = configuration("lucid", recipes={"q": Rotary(theta=7.0), "k": Rotary(theta=7.0)})
    config.save_pretrained(tmp_path)
    layers = PrecondattnForCausalLM(AutoConfig.from_pretrained(tmp_path)).model.layers
    assert all("theta = 7," in repr(layer.attention) for layer in layers)


def test_the_base_model_reads_the_same_file(tmp_path):
    model, (ids, _) = made(layer_types=HYBRID), prompts()
    model.save_pretrained(tmp_path)
    states = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
    outputs = model(ids, output_hidden_states=True)
    assert torch.equal(states, outputs.hidden_states[-1])
    assert len(outputs.hidden_states) == 3
    assert torch.equal(model.lm_head(states), outputs.logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_if_they_are_tied(tied, tmp_path):
    model = PrecondattnForCausalLM(configuration("gla", tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_weights_that_a_file_lacks_start_as_declared_and_the_others_are_loaded(tmp_path):
    model = made("gla")
    missing = {name for name in model.state_dict() if "layers.1.attention.g_" in name}
    kept = {name: w for name, w in model.state_dict().items() if name not in missing}
    model.save_pretrained(tmp_path, state_dict=kept)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        if name in missing:
            assert again[name].abs().max() < 3
        else:
            assert torch.equal(again[name], weight), name
    down = again["model.layers.1.attention.g_down_proj.weight"]
    assert 0.1 < down.std() < 0.4  # 24 terms: deviation 0.2.


def test_a_model_made_on_meta_takes_no_memory_until_it_is_filled():
    with torch.device("meta"):
        model = PrecondattnForCausalLM(configuration(layer_types=HYBRID))
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert model(prompts()[0]).logits.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model, (ids, mask) = PrecondattnForCausalLM(configuration(layer_types=HYBRID)), prompts()

    def gradients():
        model.zero_grad()
        model(ids, mask, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model.train()
    plain, calls = gradients(), []
    # Named anew in 5.23.
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for block in model.model.layers:
        block.attention.register_forward_hook(lambda *_: calls.append(1))
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)
    assert len(calls) == 4  # Both layers are computed twice.
    with pytest.raises(ValueError, match="use_cache: gradient checkpointing"):
        model(ids, use_cache=True)


def test_labels_give_the_loss_of_transformers():
    model, (ids, mask) = made(layer_types=HYBRID), prompts()
    labels = ids.masked_fill(mask == 0, -100)
    outputs = model(ids, mask, labels=labels)
    by_hand = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(outputs.loss, by_hand)
    valid = (labels[:, 1:] != -100).sum()
    summed = model(ids, mask, labels=labels, num_items_in_batch=2 * valid).loss
    torch.testing.assert_close(summed, by_hand / 2)


def test_no_cache_is_made_where_gradients_are():
    model, (ids, _) = made("lucid"), prompts()
    assert model(ids).past_key_values is None
    with torch.no_grad():
        assert model(ids).past_key_values.get_seq_length() == 9
        assert model(ids, use_cache=False).past_key_values is None


def test_a_cache_is_continued_over_two_calls_of_generate():
    model, (ids, mask) = made(layer_types=HYBRID), prompts()
    first = written(model, ids, mask, do_sample=False)
    longer = torch.cat([mask, mask.new_ones(2, 5)], 1)
    cache = copy.deepcopy(first.past_key_values)
    second = written(model, first.sequences, longer, do_sample=False, past_key_values=cache)
    whole = written(model, first.sequences, longer, do_sample=False, use_cache=False)
    assert second.sequences.tolist() == whole.sequences.tolist()
    assert first.past_key_values.get_seq_length() == 13
    assert cache.get_seq_length() == 18


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 2}, {"num_beams": 2}]
)
def test_other_ways_to_fill_a_cache_write_the_same(options):
    model, (ids, mask) = made(layer_types=HYBRID), prompts()
    found = written(model, ids, mask, do_sample=False, **options)
    only_beams = {name: n for name, n in options.items() if name == "num_beams"}
    expected = written(model, ids, mask, do_sample=False, use_cache=False, **only_beams)
    assert found.sequences.tolist() == expected.sequences.tolist()
    if "cache_implementation" in options:
        assert found.past_key_values.get_max_length() == 13


@pytest.mark.parametrize("mechanism", KINDS)
def test_rejected_drafts_leave_no_trace(mechanism, monkeypatch):
    """The mechanisms have caches of croppable tokens, states, windows and rewritten rows."""
    model, (ids, _) = made(mechanism), prompts()
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0)
    removed, crop = [], PrecondattnCache.crop
    monkeypatch.setattr(PrecondattnCache, "crop", lambda *a: removed.append(a[1]) or crop(*a))
    repeated = ids[1:].repeat(1, 2)
    greedy = written(model, repeated, None, do_sample=False, use_cache=False)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}):
        found = written(model, repeated, None, do_sample=False, **options)
        assert found.sequences.tolist() == greedy.sequences.tolist()
        for a, b in zip(found.logits, greedy.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert min(removed) < 0


@pytest.mark.parametrize("mechanism", ["gated_delta", "ccq(gla)", "mlstm"])
def test_drafts_of_a_state_are_rejected_without_a_second_pass(mechanism, monkeypatch):
    model, (ids, _) = made(mechanism), prompts()
    repeated = ids[1:].repeat(1, 2)
    greedy = written(model, repeated, None, do_sample=False, use_cache=False)
    cropped, crop = [], Cache.crop
    monkeypatch.setattr(Cache, "crop", lambda *a: cropped.append(a[1]) or crop(*a))
    monkeypatch.setattr(DraftRecording, "before", None)
    found = written(model, repeated, None, do_sample=False, prompt_lookup_num_tokens=3)
    assert found.sequences.tolist() == greedy.sequences.tolist()
    assert cropped


@pytest.mark.parametrize(
    "layers", [["gated_delta"], ["softmax[window=3]"], ["ccq(gla)"], ["gated_delta", "lucid"]]
)
@torch.no_grad()
def test_a_cropped_cache_never_had_the_tokens(layers):
    model = made(layer_types=layers, num_hidden_layers=len(layers))
    ids, mask = prompts()
    wrong, expected = ids.flip(1), model(ids, mask).logits
    cache = PrecondattnCache(model.config)
    model(ids[:, :4], mask[:, :4], past_key_values=cache)
    cache.activate_past_recording()
    model(wrong[:, 4:7], mask[:, :7], past_key_values=cache)
    cache.crop(-3)
    model(torch.cat([ids[:, 4:6], wrong[:, 6:7]], 1), mask[:, :7], past_key_values=cache)
    model(wrong[:, 7:8], mask[:, :8], past_key_values=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 6
    found = model(ids[:, 6:], mask, past_key_values=cache).logits
    torch.testing.assert_close(found, expected[:, 6:], rtol=0, atol=1e-4)


def test_tokens_that_were_not_recorded_can_not_be_removed_from_a_state():
    model, (ids, _) = made(layer_types=HYBRID), prompts()
    with torch.no_grad():
        cache = model(ids).past_key_values
        with pytest.raises(ValueError, match=r"layer 0 has the buffers .*can not be cropped; call"):
            cache.crop(-1)
        with pytest.raises(ValueError, match="between -9 and 0; found -10"):
            cache.crop(-10)
        cache.activate_past_recording()
        model(ids[:, :2], past_key_values=cache)
        with pytest.raises(ValueError, match="can not be cropped"):
            cache.crop(-3)
        assert cache.get_seq_length() == 11
        cache.crop(-2)
        with pytest.raises(ValueError, match="can not be cropped"):
            cache.crop(-1)


@torch.no_grad()
def test_operations_on_a_cache_with_padding():
    model, (ids, mask) = made("lucid"), prompts()
    full = model(ids, mask).logits
    cache = PrecondattnCache(model.config)
    model(ids[:, :8], mask[:, :8], past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 5
    assert cache.layers[0].cache.length.tolist() == [1, 5]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    rest = model(ids.flip(0)[:, 5:], mask.flip(0), past_key_values=cache).logits
    torch.testing.assert_close(rest, full.flip(0)[:, 5:], rtol=0, atol=1e-4)
    cache.reset()
    again = model(ids, mask, past_key_values=cache).logits
    torch.testing.assert_close(again, full, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_growing_cache_keeps_its_tokens_and_a_fixed_one_is_full():
    model, ids = made("lucid"), torch.randint(1, VOCABULARY, (1, 60))
    growing, fixed = PrecondattnCache(model.config), PrecondattnCache(model.config, 16)
    parts = [model(part, past_key_values=growing).logits for part in ids.split(10, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=0, atol=1e-4)
    model(ids[:, :16], past_key_values=fixed)
    with pytest.raises(ValueError, match="at most 16 tokens"):
        model(ids[:, 16:17], past_key_values=fixed)


def test_compiled_it_gives_the_same_without_a_break_in_the_graph():
    model, (ids, mask) = made(layer_types=["gla", "softmax"]), prompts()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(ids, mask, use_cache=False).logits
        expected = model(ids, mask, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_a_device_map_places_the_weights(device_map, tmp_path):
    pytest.importorskip("accelerate")
    model, (ids, mask) = made(layer_types=HYBRID), prompts()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(again(ids, mask).logits.cpu(), model(ids, mask).logits)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_are_offloaded_are_refused(tmp_path):
    pytest.importorskip("accelerate")
    made("lucid").save_pretrained(tmp_path)
    where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    where |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=where, offload_folder=tmp_path / "offloaded"
    )
    with pytest.raises(RuntimeError, match="can not be offloaded"):
        again(prompts()[0])


def test_half_precision_and_autocast(tmp_path):
    model, (ids, mask) = made(layer_types=HYBRID), prompts()
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert written(half, ids, mask).logits[0].isfinite().all()
    assert half.dtype == half(ids).logits.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, mask, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_embeddings_are_resized():
    model = made("gla")
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model(prompts()[0]).logits.shape == (2, 9, 70)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mechanism": "lucidd"}, ValueError, "lucid"),
        ({"mechanism": 3}, TypeError, "mechanism must be a text or a mechanism; found 3"),
        (
            {"sliding_window": 16},
            TypeError,
            r"has no effect \(here: window=, an option of softmax, as in 'softmax\[window=128\]'\)",
        ),
        (
            {"rope_theta": 1e6},
            TypeError,
            r"recipes=\{x: Rotary\(theta=1e6\) for x in 'qk'\}",
        ),
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
        (
            {"attention_arguments": {"softmax": {"head": 2}}},
            ValueError,
            "'head' of softmax is none",
        ),
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
    ],
)
def test_a_configuration_that_can_not_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        PrecondattnConfig(**{**SMALL, **options})


def test_a_configuration_that_was_changed_is_checked_again(tmp_path):
    config = configuration(layer_types=HYBRID)
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers=3 layers; found 2"):
        PrecondattnForCausalLM(config)


class Own(Rotary):
    pass


def test_a_recipe_that_a_file_can_not_name_is_refused():
    with pytest.raises(TypeError, match="which a configuration can store; found Own"):
        configuration("lucid", recipes={"q": Own()})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_mask": torch.ones(2, 8, dtype=int)}, ValueError, r"shape \(2, 9\), a column"),
        ({"attention_mask": torch.full((2, 9), 0.5)}, ValueError, "must have 1 for tokens"),
        ({"attention_mask": [[1] * 9] * 2}, TypeError, "must be a tensor; found list"),
        ({"past_key_values": DynamicCache()}, TypeError, "PrecondattnCache.*found DynamicCache"),
        ({"inputs_embeds": torch.ones(2, 9, 24)}, ValueError, "input_ids or inputs_embeds"),
        ({"output_attentions": True}, ValueError, "never computed"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, TypeError, "cu_seq_lens_q is no argument"),
        ({"token_type_ids": torch.ones(2, 9)}, TypeError, "token_type_ids is no argument"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}, ValueError, "packed"),
        ({"position_ids": torch.arange(9)}, ValueError, r"shape \(b, t\); found \(9,\)"),
    ],
)
def test_a_call_that_can_not_be_is_refused(options, error, message):
    model = made("gla")
    with pytest.raises(error, match=message):
        model(prompts()[0], **options)


def test_caches_that_can_not_be_are_refused():
    model, (ids, _) = made("lucid"), prompts()
    with pytest.raises(ValueError, match="'dynamic' or 'static' for this model; found 'quantized'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="quantized")
    with pytest.raises(ValueError, match="assistant_early_exit: this model runs all layers"):
        model.generate(ids[:1], max_new_tokens=2, assistant_early_exit=1)
    assert model.config.num_hidden_layers == 2
    with pytest.raises(ValueError, match="has 2 layers, and the model has 1"):
        made("lucid", num_hidden_layers=1)(ids, past_key_values=PrecondattnCache(model.config))
    with pytest.raises(ValueError, match="capacity must be a whole number"):
        PrecondattnCache(model.config, 0)
    cache = PrecondattnCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="2 sequences; found 1"):
            model(ids[:1], past_key_values=cache)
    with pytest.raises(TypeError, match="filled by PrecondattnForCausalLM only"):
        cache.update(torch.ones(1), torch.ones(1), 0)


def test_a_rate_of_dropout_is_refused_and_not_ignored():
    for name in ("attention_dropout", "dropout", "resid_pdrop"):
        with pytest.raises(TypeError, match=f"{name}: no mechanism drops weights"):
            PrecondattnConfig(**{name: 0.1})
    PrecondattnConfig(attention_dropout=0.0)


def of_softmax(layers=("softmax", "laser")):
    return PrecondattnForCausalLM(PrecondattnConfig(**SMALL, layer_types=[*layers])).eval()


def test_a_model_takes_a_boolean_mask_of_pairs_and_a_prefix():
    model, ids = of_softmax(), torch.randint(VOCABULARY, (2, 9))
    pairs = (torch.rand(2, 1, 9, 9) > 0.4).tril()
    prefix = torch.tensor([2, 4])
    with torch.no_grad():
        expected = model(ids, attention_mask=pairs, prefix=prefix, use_cache=False).logits
        x = model.model.embed_tokens(ids)
        for block in model.model.layers:
            x = block(x, attn_mask=pairs, prefix=prefix)
        torch.testing.assert_close(model.lm_head(model.model.norm(x)), expected)
        cache, parts = PrecondattnCache(model.config), []
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            mask = pairs[:, :, start:stop, :stop]
            given = {"attention_mask": mask, "past_key_values": cache, "prefix": prefix}
            parts.append(model(ids[:, start:stop], **given).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected)


def test_generation_sees_a_prefix_of_a_padded_prompt():
    model, ids = of_softmax(), torch.randint(VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    prefix, options = torch.tensor([2, 4]), {"max_new_tokens": 4, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, prefix=prefix, **options)
    for i, start in enumerate((3, 0)):
        alone = ids[i : i + 1, start:]
        expected = model.generate(alone, prefix=prefix[i : i + 1], **options)
        torch.testing.assert_close(found[i : i + 1, start:], expected)
    assert not torch.equal(found, model.generate(ids, attention_mask=mask, **options))


def test_masks_of_pairs_that_do_not_fit_a_model_are_refused():
    model, ids = of_softmax(), torch.randint(VOCABULARY, (2, 5))
    pairs = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(TypeError, match=r"must be boolean, True where .* found torch.float32"):
        model(ids, attention_mask=torch.where(pairs, 0.0, -torch.inf))
    with pytest.raises(ValueError, match=r"\(2 or 1, heads or 1, 5, 5\), a column for each"):
        model(ids, attention_mask=pairs[..., :4])
    with pytest.raises(ValueError, match="whose pattern is causal"):
        model(ids, attention_mask=pairs.mT)
    cache = PrecondattnCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1]] * 2), past_key_values=cache)
    with pytest.raises(ValueError, match="can not follow padding in the cache"):
        model(
            ids[:, :1],
            attention_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool),
            past_key_values=cache,
        )
    with pytest.raises(ValueError, match="takes no prefix: gated_delta sums up all tokens"):
        of_softmax(["softmax", "gated_delta"])(ids, prefix=torch.tensor([1, 2]))
