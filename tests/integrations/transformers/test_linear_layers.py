"""Linear layers of existing models, computed by this library: the outputs of Transformers' own."""

import copy
import io
from importlib import import_module

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from precondattn.integrations.transformers import add_ccq, restore_backend_for, use_backend_for
from precondattn.integrations.transformers.linear.layers import KINDS
from precondattn_torch.runners import UnrecordedRunner

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1}
SMALL |= {"eos_token_id": None, "num_hidden_layers": 4}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
LATENT = {
    **ATTENTION,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGURATIONS = {
    "Qwen3Next": {**ATTENTION, **DELTA, "head_dim": 8, "num_experts": 0, "mlp_only_layers": []},
    "OlmoHybrid": {**ATTENTION, **DELTA, "linear_num_key_heads": 4},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "Qwen3_5Text": {**ATTENTION, **DELTA, "head_dim": 8},
    "FalconH1": {**ATTENTION, **MAMBA, "head_dim": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "GraniteMoeHybrid": {
        **ATTENTION,
        **MAMBA,
        "mamba_chunk_size": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "Zamba2": {
        **ATTENTION,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
    "Bamba": {**ATTENTION, **MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 8},
    "KimiLinear": {
        **LATENT,
        "mlp_layer_types": ["dense"] * 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "BailingHybrid": {
        **LATENT,
        "mlp_layer_types": ["dense"] * 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_mtp_layers": 0,
        "head_dim": 8,
    },
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def made(name, **options):
    """A model whose linear layers matter: larger weights, and states that last for many tokens."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    options = {**SMALL, **CONFIGURATIONS[name], **options}
    config = getattr(transformers, f"{name}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
            if parameter_name.endswith("dt_bias"):
                parameter.fill_(-3)
            if parameter_name.endswith("conv1d.weight") and parameter.std() < 0.5:
                parameter.mul_(10)
    return model


def prompts():
    ids, mask = torch.randint(2, VOCABULARY, (2, 21)), torch.ones(2, 21, dtype=torch.int64)
    mask[0, :4] = 0
    return ids.masked_fill(mask == 0, 0), mask


def close(found, expected):
    """Equal to 1e-5 of the largest entry."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_outputs_and_gradients_are_those_of_transformers(name):
    model, (ids, mask) = made(name), prompts()
    ours = use_backend_for(copy.deepcopy(model))
    results = []
    for each in (model, ours):
        outputs = each(ids, attention_mask=mask, labels=ids, use_cache=False)
        outputs.loss.backward()
        results.append(outputs)
    close(results[1].logits, results[0].logits)
    for (parameter, expected), found in zip(
        model.named_parameters(), ours.parameters(), strict=True
    ):
        if expected.grad is not None and expected.grad.abs().max() > 1e-6:
            scale = expected.grad.abs().max().item()
            torch.testing.assert_close(
                found.grad, expected.grad, rtol=0, atol=1e-4 * scale, msg=parameter
            )


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beam"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_generation_uses_the_caches_of_transformers(name, options):
    model, (ids, mask) = made(name), prompts()
    ours = use_backend_for(copy.deepcopy(model))
    options = {**options, "max_new_tokens": 6, "do_sample": False, "output_logits": True}
    expected, found = (
        each.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
        for each in (model, ours)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()
    for a, b in zip(found.logits, expected.logits, strict=True):
        close(a, b)


def in_float64(q, k, v, g, beta, state):
    """A gated delta rule, token by token; g (b, t, h) or (b, t, h, d)."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g, out = g if g.ndim == 4 else g[..., None], []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        read = torch.einsum("bhd,bhde->bhe", k[:, t], state)
        change = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), state


@pytest.mark.parametrize("kind", ["gated_delta", "kda"])
@pytest.mark.parametrize("count", [1, 150])
def test_a_delta_rule_is_as_near_to_float64_as_that_of_transformers(kind, count):
    home = {"gated_delta": "qwen3_next", "kda": "kimi_linear"}[kind]
    module = import_module(f"transformers.models.{home}.modeling_{home}")
    q, k, v = torch.randn(3, 2, count, 3, 16)
    g = -(torch.rand(2, count, 3, *([16] if kind == "kda" else [])) ** 3)
    beta, state = torch.rand(2, count, 3), torch.randn(2, 3, 16, 16)
    exact = in_float64(q, k, v, g, beta, state)
    for name, ours in KINDS[kind].functions(None).items():
        errors = [
            max(
                ((a - b).abs().max() / b.abs().max()).item()
                for a, b in zip(
                    function(
                        q,
                        k,
                        v,
                        g=g,
                        beta=beta,
                        initial_state=state.clone(),
                        output_final_state=True,
                        use_qk_l2norm_in_kernel=True,
                    ),
                    exact,
                    strict=True,
                )
            )
            for function in (ours, getattr(module, name))
        ]
        assert errors[0] < max(1.5 * errors[1], 1e-6), (name, errors)


def test_the_backend_is_called_and_the_model_of_another_instance_is_not_changed(monkeypatch):
    model, (ids, mask) = made("Qwen3Next"), prompts()
    other, calls = copy.deepcopy(model), []
    original = UnrecordedRunner.step
    monkeypatch.setattr(UnrecordedRunner, "step", lambda *a: calls.append(1) or original(*a))
    use_backend_for(model)
    copied = copy.deepcopy(model)
    for each, expected in ((model, 9), (copied, 9), (other, 0)):
        each.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        assert len(calls) == expected  # Three linear layers, for the prompt and two tokens.
        calls.clear()
    restore_backend_for(model)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert not calls


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2"])
def test_a_model_can_be_compiled_as_one_graph_as_before(name):
    model, (ids, _) = made(name, num_hidden_layers=1), prompts()
    other = copy.deepcopy(model)
    for each in (use_backend_for(model), other):
        torch._dynamo.reset()
        with torch.no_grad():
            expected = other(ids, use_cache=False).logits
            compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
            close(compiled(ids, use_cache=False).logits, expected)


@pytest.mark.thorough(but=("Mamba2-aot_eager",))
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Mamba2"])
@torch.no_grad()
def test_a_compiled_step_is_one_graph_for_every_token(name, compiler):
    layers = 1 if name == "Mamba2" else 4
    # In float64: at one of these tokens, Transformers' own float32 logits are off by 1.3e-5.
    model, (ids, _) = use_backend_for(made(name, num_hidden_layers=layers)).double(), prompts()
    expected = model(ids, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    named = "cache_params" if name == "Mamba2" else "past_key_values"
    model(ids[:, :18], use_cache=True, **{named: cache})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend=compiler, fullgraph=True)
    def step(token, position, cache):
        where = {} if name == "Mamba2" else {"position_ids": position}
        return model(token, use_cache=True, **where, **{named: cache}).logits

    for t in range(18, 21):
        token, position = ids[:, t : t + 1], torch.full((1, 1), t)
        close(step(token, position, cache), expected[:, t : t + 1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("change", [use_backend_for, lambda model: add_ccq(model, 0.5)])
def test_a_pickled_model_computes_the_same(change, monkeypatch):
    from precondattn.execution import run

    model, (ids, _) = change(made("Qwen3Next")), prompts()
    expected, calls = model(ids).logits, []
    original = run.extend
    monkeypatch.setattr(run, "extend", lambda *a, **k: calls.append(1) or original(*a, **k))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(ids).logits, expected)
    assert len(calls) == 3
    layer = type(loaded.model.layers[0].linear_attn)
    restore_backend_for(loaded)
    assert type(loaded.model.layers[0].linear_attn) is layer.__base__
    loaded(ids)
    assert len(calls) == 3


def test_a_backend_can_be_chosen():
    model, (ids, _) = made("Mamba2"), prompts()
    expected = model(ids).logits
    with pytest.raises(ValueError, match="nonesuch"):
        use_backend_for(model, "nonesuch")(ids)
    close(use_backend_for(model, "reference")(ids).logits, expected)


def test_other_models_are_refused_with_the_reason():
    llama = transformers.LlamaConfig(**{**SMALL, **ATTENTION, "num_hidden_layers": 1})
    with pytest.raises(ValueError, match="no layer that calls torch_chunk_gated_delta_rule"):
        use_backend_for(transformers.LlamaForCausalLM(llama))
    with pytest.raises(TypeError, match="a PreTrainedModel of Transformers expected; found Linear"):
        use_backend_for(torch.nn.Linear(2, 2))


def test_packed_texts_are_refused():
    model, (ids, _) = made("Qwen3Next"), prompts()
    use_backend_for(model)
    with pytest.raises(ValueError, match="packed into one row"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 10, 21], dtype=torch.int32), use_cache=False)


GATED = ("Qwen3Next", "OlmoHybrid", "Qwen3_5Text")


@pytest.mark.parametrize("name", GATED)
def test_ccq_changes_the_outputs_by_as_little_as_its_gate(name):
    model, (ids, mask) = made(name), prompts()
    expected = model(ids, attention_mask=mask).logits
    close(add_ccq(copy.deepcopy(model), 1e-7)(ids, attention_mask=mask).logits, expected)
    changes = [
        (add_ccq(copy.deepcopy(model), first)(ids, attention_mask=mask).logits - expected).norm()
        for first in (0.001, 0.01, 0.1)
    ]
    assert 0 < changes[0] < changes[1] / 5 < changes[2] / 25
    assert changes[1] < 0.02 * expected.norm()


@pytest.mark.parametrize("name", GATED)
def test_ccq_keeps_its_states_in_the_caches_of_transformers(name):
    model, (ids, mask) = add_ccq(made(name), 0.5), prompts()
    for options in ({}, {"num_beams": 2}):
        options |= {"max_new_tokens": 5, "do_sample": False}
        cached = model.generate(ids, attention_mask=mask, **options)
        uncached = model.generate(ids, attention_mask=mask, use_cache=False, **options)
        assert cached.tolist() == uncached.tolist()
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    alone = model(ids[:1, 4:], use_cache=False).logits
    close(whole[:1, 4:], alone)
    with torch.no_grad():
        first = model(ids[1:, :20])
        close(model(ids[1:, 20:], past_key_values=first.past_key_values).logits, whole[1:, 20:])


def test_the_gate_of_ccq_is_trained_and_saved_and_each_copy_has_its_own():
    model, (ids, _) = add_ccq(made("Qwen3Next")), prompts()
    model(ids, labels=ids, use_cache=False).loss.backward()
    gates = [name for name, _ in model.named_parameters() if "contraction_gate" in name]
    assert len(gates) == 6
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in gates)
    assert set(gates) <= set(model.state_dict())
    before, copied = model(ids).logits, copy.deepcopy(model)
    with torch.no_grad():
        copied.get_parameter(gates[1]).fill_(2.0)
    assert torch.equal(model(ids).logits, before)
    assert not torch.allclose(copied(ids).logits, before, atol=1e-2)


def test_a_model_gets_its_own_layers_back():
    model, (ids, mask) = made("Qwen3Next"), prompts()
    names, expected = set(model.state_dict()), model(ids, attention_mask=mask).logits
    add_ccq(model, 0.5)
    with pytest.raises(ValueError, match="it has ccq; pass the backend to add_ccq"):
        use_backend_for(model)
    restore_backend_for(model)
    assert set(model.state_dict()) == names
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)


def test_ccq_is_refused_where_it_does_not_fit():
    with pytest.raises(ValueError, match="Mamba2ForCausalLM are Mamba-2's, which do not"):
        add_ccq(made("Mamba2"))
    for contraction in (0.0, 1.0, 2.0, "0.1"):
        with pytest.raises(ValueError, match="contraction must be between 0 and 1; found"):
            add_ccq(made("Qwen3Next"), contraction)


def extended(model, ids, mask, cuts):
    """The last logits, of a prefill in parts.

    Bamba counts positions from 0 in each call that is not given them.
    """
    is_mamba = model.config.model_type == "mamba2"
    key = "cache_params" if is_mamba else "past_key_values"
    cache = {}
    for start, stop in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        if not is_mamba:
            cache["position_ids"] = torch.arange(start, stop)[None]
        outputs = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **cache)
        cache = {key: outputs[key]}
    return outputs.logits[:, -1]


LINEAR = ("Mamba2", "Qwen3Next", "KimiLinear", "Bamba")
TOLD = "Transformers tells no linear layer that a single token is padding"


def test_arguments_that_transformers_ignores_or_converts_are_refused():
    model, (ids, mask) = use_backend_for(made("Mamba2")), prompts()
    close(model(ids, attention_mask=mask.float()).logits, model(ids, attention_mask=mask).logits)
    for given in ({"past_key_values": model(ids).cache_params}, {"attention_mask": mask * 0.5}):
        with pytest.raises(ValueError, match=r"Mamba-2 ignores it|must have 1 for tokens and 0"):
            copy.deepcopy(model)(ids, **given)
        restore_backend_for(copy.deepcopy(model))(ids, **given)


@pytest.mark.parametrize("name", LINEAR)
def test_tokens_after_padding_that_a_state_has_read_are_refused(name):
    # In float64: in float32 the rounding of either call can reach the bound of `close`.
    model = use_backend_for(made(name)).double()
    ids, mask = torch.randint(2, VOCABULARY, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 5:8] = 0
    message = "attention_mask: a token follows padding that is not at the left of its sequence"
    alone = model(ids[:1, :5], use_cache=False).logits
    close(model(ids[:, :8], attention_mask=mask[:, :8]).logits[:1, :5], alone)
    for cuts in ((8,), (4, 8), (7,), (5, 6)):
        with pytest.raises(ValueError, match=TOLD if cuts == (5, 6) else message):
            extended(model, ids, mask, cuts)
    with pytest.raises(ValueError, match=message):
        model.generate(ids[:, :8], attention_mask=mask[:, :8], max_new_tokens=2)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_prefill_in_parts_is_that_of_each_sequence_alone_with_padding_at_the_left(name):
    model = use_backend_for(made(name))
    ids, mask = torch.randint(2, VOCABULARY, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    alone = model(ids[:1, 5:], use_cache=False).logits[:, -1]
    for cuts in ((3,), (5,), (5, 6), (6, 8), (11,), (2, 4, 9), (2, 4, 6, 8, 10), (8, 9, 10)):
        close(extended(model, ids, mask, cuts)[:1], alone)
    for cuts in ((3, 4), (1,)):
        with pytest.raises(ValueError, match=TOLD):
            extended(model, ids, mask, cuts)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_compiled_calls_refuse_the_same_padding_in_one_graph(compiler):
    model = use_backend_for(made("Mamba2", num_hidden_layers=1))
    ids = torch.randint(2, VOCABULARY, (2, 9))
    torch._dynamo.reset()

    def call(ids, mask, cache):
        mask = None if ids.shape[1] == 1 else mask
        return model(ids, attention_mask=mask, use_cache=True, cache_params=cache).logits[:, -1]

    step = torch.compile(call, backend=compiler, fullgraph=True)

    def in_parts(padding, cuts):
        mask = torch.ones(2, 9, dtype=torch.int64)
        mask[0, padding] = 0
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        out = call(ids[:, : cuts[0]], mask[:, : cuts[0]], cache)
        for start, stop in zip(cuts, (*cuts[1:], 9), strict=True):
            out = step(ids[:, start:stop], mask[:, :stop], cache)
        return out

    left, right = slice(0, 5), slice(5, 8)
    close(in_parts(left, (3, 8))[:1], model(ids[:1, 5:], use_cache=False).logits[:, -1])
    after = "attention_mask: a token follows padding that is not at the left of its sequence"
    for cuts in ((8,), (3, 8)):
        with pytest.raises(RuntimeError, match=after):
            in_parts(right, cuts)
