"""`Block`, `Decoder` and `generate`, in PyTorch and in Flax, with the same numbers."""

import io
from contextlib import redirect_stderr

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import Block, Decoder

LAYERS = ["gated_delta", {"mechanism": "lucid", "kv_heads": 2}]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(50, 24, heads=4, layers=LAYERS)


def test_any_split_gives_the_logits_of_the_full_call(model):
    tokens = torch.randint(50, (2, 9))
    full = model(tokens)
    first, caches = model(tokens[:, :5], caches=model.init_caches(2, 16))
    second, _ = model(tokens[:, 5:], caches=caches)
    torch.testing.assert_close(torch.cat([first, second], 1), full, rtol=1e-4, atol=1e-5)


def greedy(model, prompt, count):
    """Greedy decoding by full calls, without a cache."""
    for _ in range(count):
        new = model(prompt)[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, new], 1)
    return prompt[:, -count:]


def test_generate_continues_ragged_prompts_as_each_alone(model):
    prompts = torch.randint(50, (3, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]) > 0
    tokens = model.generate(prompts, 5, mask=mask)
    for i in range(3):
        alone = prompts[i, mask[i]][None]
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


def test_a_stopped_sequence_repeats_its_last_token(model):
    prompt = torch.randint(50, (1, 4))
    free = model.generate(prompt, 6)[0].tolist()
    stopped = model.generate(prompt, 6, stop=free[1])[0].tolist()
    assert stopped[:2] == free[:2]
    first = free.index(free[1])
    assert set(stopped[first:]) == {free[1]}


def test_a_bar_shows_progress(model):
    with redirect_stderr(io.StringIO()) as shown:
        model.generate(torch.zeros(1, 2, dtype=torch.int64), 3, progress=True)
    assert "3/3 tokens" in shown.getvalue()
    assert shown.getvalue().endswith("\n")


def test_a_decoder_learns(model):
    tokens = torch.arange(16).repeat(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.5
    assert model.generate(tokens[:1, :8], 4).tolist() == [[8, 9, 10, 11]]


def test_a_compiled_decoder_is_one_graph_and_gives_the_same_with_padding():
    torch._dynamo.reset()
    model = Decoder(50, 24, heads=4, layers=["softmax"])
    tokens = torch.randint(50, (2, 6))
    mask = torch.tensor([[False, True, True, True, True, True]] * 2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(tokens, mask=mask)
    expected = model(tokens, mask=mask)
    torch.testing.assert_close(logits[mask], expected[mask], rtol=1e-4, atol=1e-5)


def test_a_number_of_layers_is_that_many_blocks_of_one_mechanism():
    blocks = Decoder(50, 24, heads=4, layers=2, mechanism="lucid").blocks
    assert [str(block.attention.mechanism) for block in blocks] == ["lucid", "lucid"]


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, r"layers: the number .* write Decoder\(..., layers=2, mechanism='lucid'\)"),
        ({"mechanism": "lucid"}, r"layers: the number .* is missing; write Decoder"),
        ({"layers": 2}, r"need one; write Decoder\(..., layers=2, mechanism='lucid'\)"),
        ({"layers": ["gla"], "mechanism": "lucid"}, "mechanism goes with a number of layers"),
        ({"layers": "lucid"}, "or a number, with mechanism='lucid'"),
        (
            {"layers": ["gla"], "dropout": 0.1},
            "Decoder: unknown keyword 'dropout' .*no mechanism drops",
        ),
        (
            {"layers": [{"mechanism": "gla", "attn_drop": 0.1}]},
            "Attention: unknown keyword 'attn_drop' .no mech",
        ),
        ({"layers": ["gla"], "hiden": 8}, "Decoder: unknown keyword 'hiden' .did you mean 'hidden"),
    ],
)
def test_keywords_that_a_decoder_does_not_take_are_answered(framework, wrong, message):
    decoder, made = Decoder, {}
    if framework == "flax":
        nnx = pytest.importorskip("flax.nnx")
        from precondattn.layers import flax

        decoder, made = flax.Decoder, {"rngs": nnx.Rngs(0)}
    with pytest.raises(TypeError, match=message):
        decoder(50, 24, heads=4, **wrong, **made)


def test_depth_counts_blocks():
    model = Decoder(9, 24, heads=2, layers=["differential"] * 3)
    assert [block.attention.depth for block in model.blocks] == [0, 1, 2]


def test_names_of_a_state_dict_stay(model):
    names = set(model.state_dict())
    assert {"embedding", "norm.gain", "blocks.0.attention_norm.gain"} < names
    mlp = {f"blocks.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert mlp | {"blocks.1.attention.q_proj.weight"} < names


def test_a_plain_mlp_has_two_layers_and_as_many_weights_as_a_gated_one():
    plain, gated = Block(24, heads=2, mlp="plain"), Block(24, heads=2)
    up, down = plain.mlp.up_proj.weight, plain.mlp.down_proj.weight
    assert {*plain.mlp.state_dict()} == {"up_proj.weight", "down_proj.weight"}
    sizes = [sum(p.numel() for p in block.mlp.parameters()) for block in (plain, gated)]
    assert sizes == [8 * 24**2] * 2
    x = torch.randn(2, 3, 24)
    inner = x @ up.T
    expected = (inner * (1 + torch.erf(inner / 2**0.5)) / 2) @ down.T
    torch.testing.assert_close(plain.mlp(x), expected)


def test_a_model_made_on_meta_is_filled_later():
    model = Decoder(9, 24, heads=2, layers=["gla"], device="meta").to_empty(device="cpu")
    model.reset_parameters()
    assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.int64))).all()


TOKENS = torch.zeros(1, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(TOKENS.float()), TypeError, "tokens must be integers of torch; found float32"),
        (lambda m: m(TOKENS[0]), ValueError, r"tokens must have shape \(b, t\); found \(2,\)"),
        (lambda m: m(TOKENS, caches=[]), TypeError, "caches must be from init_caches"),
        (lambda m: m(TOKENS, mask=TOKENS[:, :1] > 0), ValueError, r"mask must have shape \(1, 2\)"),
        (lambda m: m.generate(TOKENS, 0), ValueError, "count must be a whole number"),
        (lambda m: m.generate(TOKENS, 1, temperature=-1), ValueError, "temperature must be 0 or"),
        (lambda m: m.generate(TOKENS, 1, top_p=0), ValueError, r"top_p must be in \(0, 1\]"),
        (lambda m: m.generate(TOKENS, 1, stop=50), ValueError, "stop must be a token, 0 to 49"),
        (lambda m: m.generate(TOKENS + 50, 1), ValueError, "between 0 and 49; found 50 to 50"),
        (lambda m: m.generate(TOKENS, 1, mask=TOKENS > 0), ValueError, "needs a valid token"),
        (lambda m: Decoder(9, 24, heads=2, layers="gla"), TypeError, "layers must be a list"),
        (lambda m: Decoder(0, 24, heads=2, layers=["gla"]), ValueError, "vocabulary must be"),
        (lambda m: Block(24, heads=2, hidden=0), ValueError, "hidden must be a whole number"),
        (lambda m: Block(24, heads=2, mlp="relu"), ValueError, "mlp must be 'gated' or 'plain'"),
    ],
)
def test_bad_input_is_named(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)


@pytest.mark.thorough
def test_the_same_weights_give_the_same_model_in_flax():
    pytest.importorskip("flax")
    import jax.numpy as jnp
    from flax import nnx

    from precondattn.layers import flax as in_flax
    from precondattn.layers.torch import to_torch

    torch.manual_seed(0)
    layers = ["linear", {"mechanism": "softmax", "kv_heads": 2}]  # Quick to compile.
    model = Decoder(50, 24, heads=4, layers=layers)
    same = in_flax.Decoder(50, 24, heads=4, layers=layers, rngs=nnx.Rngs(0))
    nnx.update(same, in_flax.to_flax(model.state_dict()))
    again = to_torch(nnx.state(same, nnx.Param))
    assert set(again) == set(model.state_dict())
    prompts = torch.randint(50, (2, 6))
    mask = np.asarray([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]]) > 0
    logits = nnx.jit(lambda m, x, mask: m(x, mask=mask))(same, jnp.asarray(prompts), mask)
    expected = model(prompts, mask=torch.tensor(mask)).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    tokens = same.generate(jnp.asarray(prompts), 4, mask=jnp.asarray(mask))
    assert tokens.tolist() == model.generate(prompts, 4, mask=torch.tensor(mask)).tolist()
    with pytest.raises(TypeError, match="key: a PRNG key is needed"):
        same.generate(jnp.asarray(prompts), 4, temperature=1.0)
    unknown = nnx.jit(lambda m, x, mask: m(x, mask=mask))(same, jnp.full((2, 6), 50), mask)
    assert jnp.isnan(unknown).any()


def test_a_plain_mlp_is_the_same_in_flax():
    nnx = pytest.importorskip("flax.nnx")
    import jax.numpy as jnp

    from precondattn.layers import flax as in_flax

    model = Decoder(50, 8, heads=2, layers=["linear"], mlp="plain")
    same = in_flax.Decoder(50, 8, heads=2, layers=["linear"], mlp="plain", rngs=nnx.Rngs(0))
    nnx.update(same, in_flax.to_flax(model.state_dict()))
    x = torch.randn(2, 3, 8)
    of_flax = same.blocks[0].mlp(jnp.asarray(x.numpy()))
    expected = model.blocks[0].mlp(x).detach().numpy()
    np.testing.assert_allclose(of_flax, expected, rtol=1e-5, atol=1e-6)


def test_flax_compiles_a_step_once_for_all_calls_of_the_same_shapes():
    nnx = pytest.importorskip("flax.nnx")
    import jax.numpy as jnp

    from precondattn.layers import flax as in_flax

    traced = []

    class Counted(in_flax.Decoder):
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
