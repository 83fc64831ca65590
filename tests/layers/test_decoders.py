"""`Block`, `Decoder` and `generate`, in PyTorch and in Flax, with the same numbers."""

import io
from contextlib import redirect_stderr

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import Block, Decoder, divide_tokens
from tests.layers.torch_layers import in_flax

LAYERS = ["gated_delta", {"mechanism": "lucid", "kv_heads": 2}]
LEFT_AND_RIGHT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]) > 0


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(50, 24, heads=4, layers=LAYERS)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_any_split_gives_the_logits_of_the_full_call_also_after_a_crop(model):
    tokens = torch.randint(50, (1, 20))
    full = model(tokens)
    first, caches = model(tokens[:, :18], caches=model.init_caches(1, 30), states_every=8)
    second, _ = model(tokens[:, 18:], caches=caches)
    close(torch.cat([first, second], 1), full)
    assert [cache.checkpoints for cache in caches] == [[[8, 16]], [[]]]
    rest, _ = model(tokens[:, 16:], caches=tuple(cache.crop(16) for cache in caches))
    close(rest, full[:, 16:])
    for shape in ((0, 3), (2, 0)):
        assert model(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 50)


def greedy(model, prompt, count):
    """Greedy decoding by full calls, without a cache."""
    for _ in range(count):
        new = model(prompt)[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, new], 1)
    return prompt[:, -count:]


def test_generate_continues_ragged_prompts_as_each_alone(model):
    prompts = torch.randint(50, (3, 6))
    tokens = model.generate(prompts, 5, mask=LEFT_AND_RIGHT)
    for i, mask in enumerate(LEFT_AND_RIGHT):
        alone = prompts[i, mask][None]
        assert torch.equal(tokens[i], greedy(model, alone, 5)[0])
        assert torch.equal(tokens[i], model.generate(alone, 5)[0])


def test_draws_follow_temperature_and_top_p(model):
    prompts = torch.randint(50, (1, 4)).expand(400, 4)
    generator = torch.Generator().manual_seed(0)
    p = (model(prompts[:1])[0, -1] / 0.5).softmax(-1)
    drawn = model.generate(prompts, 1, temperature=0.5, generator=generator)[:, 0]
    shares = torch.bincount(drawn, minlength=50) / 400
    assert (shares - p).abs().max() < 5 * (p.max() / 400).sqrt()
    some = model.generate(prompts, 1, temperature=0.5, top_p=0.3, generator=generator)[:, 0]
    ranked, order = p.sort(descending=True)
    kept = order[: int((ranked.cumsum(0) - ranked < 0.3).sum())]
    assert set(some.tolist()) <= set(kept.tolist())
    assert len(set(some.tolist())) > 1


def test_a_stopped_sequence_repeats_its_last_token_and_a_bar_shows_progress(model):
    prompt = torch.randint(50, (1, 4))
    free = model.generate(prompt, 6)[0].tolist()
    stopped = model.generate(prompt, 6, stop=free[1])[0].tolist()
    assert stopped[:2] == free[:2]
    assert set(stopped[free.index(free[1]) :]) == {free[1]}
    with redirect_stderr(io.StringIO()) as shown:
        model.generate(prompt, 3, progress=True)
    assert "3/3 tokens" in shown.getvalue()
    assert shown.getvalue().endswith("\n")


@pytest.mark.thorough
def test_a_compiled_decoder_is_one_graph_and_gives_the_same_with_padding():
    torch._dynamo.reset()
    model = Decoder(50, 24, heads=4, layers=["softmax"])
    tokens, mask = torch.randint(50, (3, 6)), LEFT_AND_RIGHT
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(tokens, mask=mask)[mask], model(tokens, mask=mask)[mask])


def test_a_number_of_layers_is_that_many_blocks_of_one_mechanism_with_their_depth():
    blocks = Decoder(50, 24, heads=4, layers=2, mechanism="differential").blocks
    assert [str(block.attention.mechanism) for block in blocks] == ["differential"] * 2
    assert [block.attention.depth for block in blocks] == [0, 1]


def test_names_of_a_state_dict_stay(model):
    names = set(model.state_dict())
    assert {"embedding", "norm.gain", "blocks.0.attention_norm.gain"} < names
    mlp = {f"blocks.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert mlp | {"blocks.1.attention.q_proj.weight"} < names


def test_a_plain_mlp_has_two_layers_and_as_many_weights_as_a_gated_one_in_flax_too():
    options = {"heads": 2, "layers": ["linear"], "mlp": "plain"}
    model, gated = Decoder(50, 24, **options), Block(24, heads=2)
    plain, x = model.blocks[0], torch.randn(2, 3, 24)
    up, down = plain.mlp.up_proj.weight, plain.mlp.down_proj.weight
    assert {*plain.mlp.state_dict()} == {"up_proj.weight", "down_proj.weight"}
    sizes = [sum(p.numel() for p in block.mlp.parameters()) for block in (plain, gated)]
    assert sizes == [8 * 24**2] * 2
    inner = x @ up.T
    expected = (inner * (1 + torch.erf(inner / 2**0.5)) / 2) @ down.T
    torch.testing.assert_close(plain.mlp(x), expected)
    same = in_flax(model, 50, 24, **options)
    found = same.blocks[0].mlp(pytest.importorskip("jax.numpy").asarray(x.numpy()))
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_model_made_on_meta_is_filled_later():
    model = Decoder(9, 24, heads=2, layers=["gla"], device="meta").to_empty(device="cpu")
    model.reset_parameters()
    assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.int64))).all()


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="model has no Attention; found Linear"):
        divide_tokens(torch.nn.Linear(2, 2), None)


@pytest.mark.thorough
def test_the_same_weights_give_the_same_model_in_flax():
    nnx, jnp = pytest.importorskip("flax.nnx"), pytest.importorskip("jax.numpy")
    torch.manual_seed(0)
    options = {"heads": 4, "layers": ["linear", {"mechanism": "softmax", "kv_heads": 2}]}
    model, prompts, mask = Decoder(50, 24, **options), torch.randint(50, (3, 6)), LEFT_AND_RIGHT
    same, ids, valid = in_flax(model, 50, 24, **options), jnp.asarray(prompts), jnp.asarray(mask)
    call = nnx.jit(lambda m, x, mask: m(x, mask=mask))
    expected = model(prompts, mask=mask).detach()
    np.testing.assert_allclose(call(same, ids, valid), expected, rtol=1e-5, atol=1e-5)
    tokens = same.generate(ids, 4, mask=valid)
    assert tokens.tolist() == model.generate(prompts, 4, mask=mask).tolist()
    with pytest.raises(TypeError, match="key: a PRNG key is needed"):
        same.generate(ids, 4, temperature=1.0)
    assert jnp.isnan(call(same, jnp.full((3, 6), 50), valid)).any()


def test_flax_compiles_a_step_once_for_all_calls_of_the_same_shapes():
    nnx, jnp = pytest.importorskip("flax.nnx"), pytest.importorskip("jax.numpy")
    from precondattn.layers import flax

    traced = []

    class Counted(flax.Decoder):
        def _states(self, *arguments, **masks):
            traced.append(1)
            return super()._states(*arguments, **masks)

    def generate(seed, **options):
        model = Counted(50, 8, heads=2, layers=["linear"], rngs=nnx.Rngs(seed))
        return model.generate(jnp.ones((1, 3), int), 3, **options)

    first = generate(0)
    assert len(traced) == 2  # The prompt, and a token after it.
    assert generate(0).tolist() == first.tolist()
    generate(1)
    assert len(traced) == 2
    generate(0, temperature=0.5, key=nnx.Rngs(0)())
    assert len(traced) == 4
    generate(1, temperature=0.7, top_p=0.9, key=nnx.Rngs(1)())
    assert len(traced) == 4
