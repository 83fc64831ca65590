"""Layers of ours in Transformers' caches: windows, crops, masks, compiled steps, refusals."""

from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from precondattn.cache import KEY_MASK
from precondattn.execution import evaluation
from precondattn.integrations.transformers import (
    PrecondattnCache,
    PrecondattnConfig,
    PrecondattnForCausalLM,
    replace_attention,
    static_cache,
)
from precondattn.integrations.transformers.dynamic_cache import DynamicCacheLayer
from precondattn.integrations.transformers.static_cache import StaticCacheLayer
from tests.integrations.transformers.small_models import FAMILIES, model_of, prompts

LOCAL = ("Qwen2, a window in one layer", "Mistral", "Gemma3", "GptOss")


def double(family="Llama", mechanism="lucid"):
    # The experts of GptOss have no kernel for float64.
    dtype = torch.float32 if family == "GptOss" else torch.float64
    return replace_attention(model_of(family, dtype=dtype), mechanism)


def close(found, expected):
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def greedy(model, ids, mask, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)


def logits_in_parts(model, ids, mask, sizes, cache):
    """The logits of consecutive parts of a batch."""
    positions, parts, start = (mask.cumsum(1) - 1).clamp(min=0), [], 0
    for size in sizes:
        now = slice(start, start + size)
        parts.append(
            model(
                ids[:, now],
                attention_mask=mask[:, : now.stop],
                position_ids=positions[:, now],
                past_key_values=cache,
            ).logits
        )
        start = now.stop
    return torch.cat(parts, 1)


def logits_at_once(model, ids, mask):
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("mechanism", ["softmax", "lucid"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_in_parts_gives_what_it_gives_at_once(family, mechanism):
    (ids, mask), model = prompts(), double(family, mechanism)
    expected = logits_at_once(model, ids, mask)
    for cache in (DynamicCache(config=model.config), static_cache(model, 16)):
        found = logits_in_parts(model, ids, mask, (6, 1, 1, 3), cache)
        close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("family", LOCAL)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_window_generates_longer_than_it_is(family, implementation):
    (ids, mask), model = prompts(), double(family, "softmax")
    expected = greedy(model, ids, mask, use_cache=False)
    assert torch.equal(greedy(model, ids, mask, cache_implementation=implementation), expected)


@torch.no_grad()
def test_a_window_of_softmax_keeps_a_few_rows_and_lucid_all():
    ids = prompts()[0][:1].repeat(1, 10)
    for mechanism, rows in (("softmax", 6), ("lucid", 165)):
        model, cache = double("Mistral", mechanism), DynamicCache()
        model(ids, past_key_values=cache)
        assert cache.layers[0].cache.store["k"].shape[1] == rows


def test_the_static_cache_of_windows_alone_is_refused_where_all_tokens_are_stored():
    (ids, mask), model = prompts(), double("Mistral", "lucid")
    with pytest.raises(ValueError, match=r"static_cache\(model, max_cache_len\)"):
        greedy(model, ids, mask, cache_implementation="static")
    found = greedy(model, ids, mask, past_key_values=static_cache(model, 24))
    assert torch.equal(found, greedy(model, ids, mask, use_cache=False))


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("mechanism", ["softmax", "lucid"])
def test_drafts_are_taken_back(family, mechanism, monkeypatch):
    removed = []
    crop = DynamicCacheLayer.crop

    def counted(self, tokens_to_remove):
        removed.append(tokens_to_remove)
        crop(self, tokens_to_remove)

    monkeypatch.setattr(DynamicCacheLayer, "crop", counted)
    model, ids = double(family, mechanism), prompts()[0][:1].repeat(1, 2)
    assistant = double(family, mechanism)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.1 * torch.randn_like(assistant.lm_head.weight))
    ones = torch.ones_like(ids)
    found = greedy(model, ids, ones, assistant_model=assistant)
    assert min(removed) < 0
    assert torch.equal(found, greedy(model, ids, ones, use_cache=False))


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("mechanism", ["softmax", "lucid"])
@torch.no_grad()
def test_a_cropped_cache_never_had_the_tokens(family, mechanism):
    (ids, mask), model = prompts(), double(family, mechanism)
    cache = DynamicCache(config=model.config)
    logits_in_parts(model, ids[:, :7], mask[:, :7], (7,), cache)
    cache.activate_past_recording()
    wrong = ids.flip(1)[:, 7:]
    model(wrong[:, :3], attention_mask=mask[:, :10], past_key_values=cache)
    model(wrong[:, 3:], attention_mask=mask[:, :11], past_key_values=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 7
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, 7:]
    found = model(
        ids[:, 7:], attention_mask=mask, position_ids=positions, past_key_values=cache
    ).logits
    close(found, logits_at_once(model, ids, mask)[:, 7:])


@torch.no_grad()
def test_what_was_not_recorded_can_not_be_cropped_from_a_window():
    model, cache = double("Mistral", "softmax"), DynamicCache()
    ids = prompts()[0]
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"activate_past_recording\(\)"):
        cache.crop(-2)
    model, cache = double(), DynamicCache()
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="minus the number of tokens to remove"):
        cache.crop(3)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_two_calls_of_generate_continue_one_cache(kind):
    (ids, mask), model = prompts(), double("Llama", "lucid(laser)")
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=40)
    first = greedy(model, ids, mask, past_key_values=cache)
    more = torch.cat([first, prompts()[0][:, -3:]], 1)
    longer = torch.cat([mask, torch.ones(2, more.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    second = greedy(model, more, longer, past_key_values=cache)
    assert int(cache.get_seq_length()) == second.shape[1] - 1
    assert torch.equal(second, greedy(model, more, longer, use_cache=False))


@pytest.mark.parametrize("chunk", [3, 4])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_prompt_is_filled_in_chunks(chunk, implementation):
    (ids, mask), model = prompts(), double()
    options = {"cache_implementation": implementation, "prefill_chunk_size": chunk}
    found = greedy(model, ids, mask, disable_compile=True, **options)
    assert torch.equal(found, greedy(model, ids, mask, use_cache=False))


@torch.no_grad()
def test_padding_may_begin_after_the_cache():
    ids, mask = prompts()
    mask = torch.ones_like(mask)
    mask[1, 9:] = 0
    model = double()
    found = logits_in_parts(model, ids, mask, (5, 6), DynamicCache())
    close(found[mask.bool()], logits_at_once(model, ids, mask)[mask.bool()])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_another_mask_of_tokens_in_the_cache_is_refused(kind):
    (ids, mask), model = prompts(), double()
    ones = torch.ones_like(mask)

    def filled(padding):
        cache = DynamicCache() if kind == "dynamic" else static_cache(model, 16)
        model(ids[:, :8], attention_mask=padding[:, :8], past_key_values=cache)
        return cache

    for before, after in ((mask, None), (mask, ones), (ones, mask)):
        with pytest.raises(ValueError, match="masked otherwise than when they were stored"):
            model(ids[:, 8:], attention_mask=after, past_key_values=filled(before))
    model(ids[:, 8:], attention_mask=None, past_key_values=filled(ones))
    with pytest.raises(ValueError, match="11 tokens, with those in the cache, need as many col"):
        model(ids[:, 8:], attention_mask=mask[:, 8:], past_key_values=filled(mask))


@pytest.mark.parametrize("mechanism", ["softmax", "lucid", "lucid(laser)"])
@torch.no_grad()
def test_a_compiled_step_is_one_graph_and_writes_in_place(mechanism):
    (ids, mask), model = prompts(), double("Llama", mechanism)
    expected = logits_at_once(model, ids, mask)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    cache = StaticCache(config=model.config, max_cache_len=16)
    logits_in_parts(model, ids[:, :6], mask[:, :6], (6,), cache)
    buffers = {id(x): x for x in cache.layers[0].cache.store.values()}
    places = [x.data_ptr() for x in buffers.values()]

    @torch.compile(backend=backend, fullgraph=True)
    def step(token, mask, positions, cache):
        return model(
            token, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits

    for t in range(6, 11):
        padded = torch.zeros(2, 16, dtype=torch.long)
        padded[:, : t + 1] = mask[:, : t + 1]
        position = mask[:, : t + 1].sum(1, keepdim=True) - 1
        close(step(ids[:, t : t + 1], padded, position, cache), expected[:, t : t + 1])
    assert len(graphs) == 1
    assert {id(x) for x in cache.layers[0].cache.store.values()} == set(buffers)
    assert [x.data_ptr() for x in buffers.values()] == places


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["softmax", "lucid(laser)"])
@torch.no_grad()
def test_a_step_compiled_by_inductor_writes_the_same(mechanism):
    (ids, mask), model = prompts(), replace_attention(model_of(num_hidden_layers=1), mechanism)
    expected = logits_at_once(model, ids, mask)
    cache = static_cache(model, 16)
    logits_in_parts(model, ids[:, :6], mask[:, :6], (6,), cache)
    torch._dynamo.utils.counters.clear()

    @torch.compile(fullgraph=True)
    def step(token, mask, positions, cache):
        return model(
            token, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits

    for t in range(6, 11):
        padded = torch.zeros(2, 16, dtype=torch.long)
        padded[:, : t + 1] = mask[:, : t + 1]
        position = mask[:, : t + 1].sum(1, keepdim=True) - 1
        close(step(ids[:, t : t + 1], padded, position, cache), expected[:, t : t + 1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_a_static_cache_keeps_its_buffers_in_eager_steps_and_when_reset():
    (ids, mask), model = prompts(), double()
    cache = static_cache(model, 16)
    found = logits_in_parts(model, ids, mask, (6, 1, 4), cache)
    places = [x.data_ptr() for x in cache.layers[0].cache.store.values()]
    cache.reset()
    again = logits_in_parts(model, ids, mask, (6, 1, 4), cache)
    close(again, found)
    assert [x.data_ptr() for x in cache.layers[0].cache.store.values()] == places
    with pytest.raises(ValueError, match="is for 16 tokens; found 11 new ones after 11"):
        model(ids, past_key_values=cache, attention_mask=torch.cat([mask, mask], 1))


@pytest.mark.parametrize("mechanism", ["softmax", "lucid"])
@torch.no_grad()
def test_a_static_cache_uses_its_mask_only_once_there_is_padding(mechanism, monkeypatch):
    (ids, _), model = prompts(), double("Llama", mechanism)
    mask = torch.ones_like(ids)
    mask[1, 8:10] = 0
    masked = []
    extend = type(model.model.layers[0].self_attn.precondattn.mechanism).extend

    def recorded(self, cache, *args, **kwargs):
        masked.append(KEY_MASK in cache.store)
        return extend(self, cache, *args, **kwargs)

    kind = type(model.model.layers[0].self_attn.precondattn.mechanism)
    monkeypatch.setattr(kind, "extend", recorded)
    cache = static_cache(model, 16)
    found = logits_in_parts(model, ids, mask, (6, 1, 2, 1, 1), cache)
    assert masked == 4 * [False] + 6 * [True]
    close(found[mask.bool()], logits_at_once(model, ids, mask)[mask.bool()])
    assert torch.equal(cache.layers[0].cache.store[KEY_MASK][:, :11], mask.bool())


@torch.no_grad()
def test_eager_steps_after_compiled_ones_know_their_padding():
    (ids, mask), model = prompts(), double()
    mask = torch.ones_like(mask)
    mask[1, 8] = 0
    expected, cache = logits_at_once(model, ids, mask), static_cache(model, 16)
    logits_in_parts(model, ids[:, :8], mask[:, :8], (8,), cache)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def step(t):
        padded = torch.zeros(2, 16, dtype=torch.long)
        padded[:, : t + 1] = mask[:, : t + 1]
        return model(
            ids[:, t : t + 1],
            attention_mask=padded,
            position_ids=positions[:, t : t + 1],
            past_key_values=cache,
        ).logits

    torch.compile(step, backend="eager", fullgraph=True)(8)
    for t in (9, 10):
        close(step(t), expected[:, t : t + 1])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_sequences_are_repeated_selected_and_reordered(kind):
    (ids, mask), model = prompts(), double()
    cache = DynamicCache() if kind == "dynamic" else static_cache(model, 16)
    logits_in_parts(model, ids[:, :8], mask[:, :8], (8,), cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    rows = torch.tensor([1, 0, 1])
    positions = (mask.cumsum(1) - 1).clamp(min=0)[rows, 8:]
    found = model(
        ids[rows, 8:], attention_mask=mask[rows], position_ids=positions, past_key_values=cache
    ).logits
    close(found, logits_at_once(model, ids, mask)[rows, 8:])


@torch.no_grad()
def test_a_cache_grows():
    ids = prompts()[0].repeat(1, 8)
    mask, model = torch.ones_like(ids), double()
    cache = DynamicCache()
    found = logits_in_parts(model, ids, mask, (60, 1, 1, 1, 1, 1, 23), cache)
    close(found, logits_at_once(model, ids, mask))


def test_gradients_reach_the_tokens_of_a_growing_cache_and_not_of_a_static_one():
    (ids, mask), model = prompts(), double()
    weight = model.model.layers[0].self_attn.v_proj.weight
    gradients = []
    for split in (False, True):
        if split:
            logits = logits_in_parts(model, ids, mask, (6, 5), DynamicCache())
        else:
            logits = logits_at_once(model, ids, mask)
        model.zero_grad()
        logits[:, 6:].square().sum().backward()
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(*gradients)
    with pytest.raises(ValueError, match="static cache is written to in place"):
        model(ids, past_key_values=static_cache(model, 16))


@pytest.mark.parametrize("stop", ["within a layer", "between layers"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "own", "own, with gradients"])
def test_a_cache_after_an_interrupted_call_is_refused_or_as_before(kind, stop, monkeypatch):
    ids, model = prompts()[0][:1], double(mechanism="softmax")
    cache = DynamicCache() if kind == "dynamic" else static_cache(model, 16)
    if kind.startswith("own"):
        sizes = {"vocab_size": 97, "hidden_size": 16, "num_attention_heads": 2}
        model = PrecondattnForCausalLM(PrecondattnConfig(**sizes, layer_types=["softmax", "gla"]))
        cache = PrecondattnCache(model.config)
    with torch.inference_mode():
        model(ids[:, :8], past_key_values=cache)
    with torch.set_grad_enabled(kind.endswith("gradients")):
        expected = model(ids).logits
        model(ids[:, 8:9], past_key_values=cache)
        of_layer = stop == "within a layer"
        where = evaluation if of_layer else model.model.layers[1]
        interrupt = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr(where, "updated" if of_layer else "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 9:], past_key_values=cache)
        monkeypatch.undo()
        if torch.is_grad_enabled():
            close(model(ids[:, 9:], past_key_values=cache).logits, expected[:, 9:])
        else:
            with pytest.raises(ValueError, match=r"was donated|different numbers of tokens"):
                model(ids[:, 9:], past_key_values=cache)
        cache.reset()
        close(model(ids, past_key_values=cache).logits, expected)


def test_caches_that_hold_something_else_are_refused():
    ids, _ = prompts()
    model = model_of()
    used = model(ids).past_key_values
    replace_attention(model, "lucid")
    with pytest.raises(ValueError, match="of another attention"):
        model(ids, past_key_values=used)
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    with pytest.raises(TypeError, match="an offloaded cache moves copies"):
        model(ids, past_key_values=offloaded)

    class Quantised(DynamicLayer):
        pass

    quantised = Cache(layers=[Quantised(), Quantised()])
    with pytest.raises(TypeError, match="found Quantised, whose copies"):
        model(ids, past_key_values=quantised)


def test_the_layers_are_ours():
    (ids, mask), model = prompts(), double()
    for implementation, kind in (("dynamic", DynamicCacheLayer), ("static", StaticCacheLayer)):
        out = greedy(
            model, ids, mask, cache_implementation=implementation, return_dict_in_generate=True
        )
        layers = out.past_key_values.layers
        assert [type(layer) for layer in layers] == [kind, kind]
        assert sorted(layers[0].cache.store) == ["k", "key_mask", "rms(k)", "y"]
