"""Layers of ours in Transformers' caches: masks, compiled steps, interrupts, refusals."""

from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from precondattn.cache import KEY_MASK
from precondattn.execution import evaluation
from precondattn.integrations.transformers import replace_attention, static_cache
from precondattn.integrations.transformers.dynamic_cache import DynamicCacheLayer
from precondattn.integrations.transformers.static_cache import StaticCacheLayer
from tests.integrations.transformers.small_models import (
    cache_for,
    close,
    greedy,
    logits_at_once,
    logits_in_parts,
    model,
    model_of,
    prompts,
)

IDS, MASK = prompts()
ONES = torch.ones_like(MASK)
kinds = pytest.mark.parametrize("kind", ["dynamic", "static"])


@kinds
@torch.no_grad()
def test_another_mask_of_tokens_in_the_cache_is_refused(kind):
    of = model("Llama")

    def filled(padding):
        cache = cache_for(of, kind)
        of(IDS[:, :8], attention_mask=padding[:, :8], past_key_values=cache)
        return cache

    for before, after in ((MASK, None), (MASK, ONES), (ONES, MASK)):
        with pytest.raises(ValueError, match="masked otherwise than when they were stored"):
            of(IDS[:, 8:], attention_mask=after, past_key_values=filled(before))
    of(IDS[:, 8:], attention_mask=None, past_key_values=filled(ONES))
    with pytest.raises(ValueError, match="11 tokens, with those in the cache, need as many col"):
        of(IDS[:, 8:], attention_mask=MASK[:, 8:], past_key_values=filled(MASK))


def in_steps(of, cache, mask, backend):
    """Logits of tokens 6 and later, each of a compiled step with the mask of a static cache."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits_in_parts(of, IDS, mask, (6,), cache)

    @torch.compile(backend=backend, fullgraph=True)
    def step(token, mask, positions, cache):
        return of(token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits

    for t in range(6, 11):
        padded = torch.zeros(2, 16, dtype=torch.long)
        padded[:, : t + 1] = mask[:, : t + 1]
        yield step(IDS[:, t : t + 1], padded, positions[:, t : t + 1], cache)


@pytest.mark.thorough(but=("lucid(laser)",))
@pytest.mark.parametrize("mechanism", ["softmax", "lucid(laser)"])
@torch.no_grad()
def test_a_compiled_step_is_one_graph_and_writes_in_place(mechanism):
    of, graphs = model("Llama", mechanism), []
    cache = StaticCache(config=of.config, max_cache_len=16)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    steps = in_steps(of, cache, MASK, backend)
    found = [next(steps)]
    buffers = {id(x): x for x in cache.layers[0].cache.store.values()}
    places = [x.data_ptr() for x in buffers.values()]
    close(torch.cat([*found, *steps], 1), logits_at_once(of, IDS, MASK)[:, 6:])
    assert len(graphs) == 1
    assert {id(x) for x in cache.layers[0].cache.store.values()} == set(buffers)
    assert [x.data_ptr() for x in buffers.values()] == places
    cache.reset()  # Eager steps have the buffers too.
    found = logits_in_parts(of, IDS, MASK, (6, 1, 4), cache)[:, 6:]
    close(found, logits_at_once(of, IDS, MASK)[:, 6:])
    assert [x.data_ptr() for x in cache.layers[0].cache.store.values()] == places


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["softmax", "lucid(laser)"])
@torch.no_grad()
def test_a_step_compiled_by_inductor_writes_the_same(mechanism):
    of = replace_attention(model_of(num_hidden_layers=1), mechanism)
    torch._dynamo.utils.counters.clear()
    found = torch.cat([*in_steps(of, static_cache(of, 16), MASK, "inductor")], 1)
    close(found, logits_at_once(of, IDS, MASK)[:, 6:])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.thorough
@torch.no_grad()
def test_eager_steps_after_compiled_ones_know_their_padding():
    of, mask = model("Llama"), ONES.clone()
    mask[1, 6] = 0
    cache = static_cache(of, 16)
    next(in_steps(of, cache, mask, "eager"))
    found = logits_in_parts(of, IDS, mask, (1, 3), cache, 7)
    close(found, logits_at_once(of, IDS, mask)[:, 7:])


@pytest.mark.parametrize("mechanism", ["softmax", "lucid"])
@torch.no_grad()
def test_a_static_cache_uses_its_mask_only_once_there_is_padding(mechanism, monkeypatch):
    of, mask, masked = model("Llama", mechanism), ONES.clone(), []
    mask[1, 8:10] = 0
    kind = type(of.model.layers[0].self_attn.precondattn.mechanism)
    extend = kind.extend

    def recorded(self, cache, *args, **kwargs):
        masked.append(KEY_MASK in cache.store)
        return extend(self, cache, *args, **kwargs)

    monkeypatch.setattr(kind, "extend", recorded)
    cache = static_cache(of, 16)
    found = logits_in_parts(of, IDS, mask, (6, 1, 2, 1, 1), cache)
    assert masked == 4 * [False] + 6 * [True]
    close(found[mask.bool()], logits_at_once(of, IDS, mask)[mask.bool()])
    assert torch.equal(cache.layers[0].cache.store[KEY_MASK][:, :11], mask.bool())


def test_gradients_reach_the_tokens_of_a_growing_cache():
    of = model("Llama")
    weight, gradients = of.model.layers[0].self_attn.v_proj.weight, []
    for logits in (
        logits_in_parts(of, IDS, MASK, (6, 5), DynamicCache()),
        logits_at_once(of, IDS, MASK),
    ):
        gradients += torch.autograd.grad(logits[:, 6:].square().sum(), weight)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("stop", ["within a layer", "between layers"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "own", "own, with gradients"])
def test_a_cache_after_an_interrupted_call_is_refused_or_as_before(kind, stop, monkeypatch):
    of, ids = model(*(("own", "softmax + gla") if "own" in kind else ("Llama", "softmax"))), IDS[:1]
    cache = cache_for(of, kind)
    with torch.inference_mode():
        of(ids[:, :8], past_key_values=cache)
    with torch.set_grad_enabled(kind.endswith("gradients")):
        expected = of(ids).logits
        of(ids[:, 8:9], past_key_values=cache)
        of_layer = stop == "within a layer"
        where = evaluation if of_layer else of.model.layers[1]
        interrupt = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr(where, "updated" if of_layer else "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            of(ids[:, 9:], past_key_values=cache)
        monkeypatch.undo()
        if torch.is_grad_enabled():
            close(of(ids[:, 9:], past_key_values=cache).logits, expected[:, 9:])
        else:
            with pytest.raises(ValueError, match=r"was donated|different numbers of tokens"):
                of(ids[:, 9:], past_key_values=cache)
        cache.reset()
        close(of(ids, past_key_values=cache).logits, expected)


def test_caches_that_hold_something_else_are_refused():
    class Quantised(DynamicLayer):
        pass

    quantised = Cache(layers=[Quantised(), Quantised()])
    with pytest.raises(TypeError, match="found Quantised, whose copies"):
        model("Llama")(IDS, past_key_values=quantised)


def test_the_layers_are_ours():
    for kind, layer in (("dynamic", DynamicCacheLayer), ("static", StaticCacheLayer)):
        options = {"cache_implementation": kind, "return_dict_in_generate": True}
        layers = greedy(model("Llama"), IDS, MASK, **options).past_key_values.layers
        assert [type(each) for each in layers] == [layer, layer]
        assert sorted(layers[0].cache.store) == ["k", "key_mask", "rms(k)", "y"]
