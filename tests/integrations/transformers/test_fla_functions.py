"""Functions that take the place of flash-linear-attention's kernels; it need not be installed."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from torch.nn.functional import conv1d, silu

from precondattn.integrations.transformers.linear.fla.convolution import (
    causal_conv1d,
    causal_conv1d_update,
)
from precondattn.integrations.transformers.linear.fla.modules import (
    CrossEntropy,
    rms_norm,
    rms_norm_gated,
)
from precondattn.integrations.transformers.linear.fla.recurrences import recurrences
from precondattn.integrations.transformers.linear.fla.rotary import rotary_embedding

PEERS = Path(__file__).parents[2] / "mathematics" / "peers"
FUNCTIONS = recurrences(None)
CASES = {
    "gla": ("linear", "chunk_gla", {}),
    "linear": ("linear", "chunk_linear_attn", {"normalize": False}),
    "normalized": ("linear", "chunk_linear_attn", {}),
    "retention": ("linear", "chunk_retention", {}),
    "delta": ("delta", "chunk_delta_rule", {}),
    "recurrent": ("delta", "fused_recurrent_gated_delta_rule", {}),
    "kda": ("kda", "fused_recurrent_kda", {}),
    "kda_chunk": ("kda", "chunk_kda", {"safe_gate": True}),
    "gsa": ("gsa", "chunk_gsa", {}),
}
"""The file, the function and its options for each case of the saved results."""
STATES = {"normalized": ("state", "mass"), "gsa": ("keys", "values")}
CU_SEQLENS = torch.tensor([0, 4, 5, 13], dtype=torch.int32)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def saved(case):
    with np.load(PEERS / f"{CASES[case][0]}_fla.npz") as entries:
        start = f"{case}_"
        return {
            name.removeprefix(start): torch.from_numpy(array)
            for name, array in entries.items()
            if name.startswith(start) and array.dtype.kind == "f"
        }


def inputs_of(entries):
    return {name: entries[name] for name in ("q", "k", "v", "g", "beta", "s") if name in entries}


def called(case, inputs, **options):
    _, name, own = CASES[case]
    return FUNCTIONS[name](**inputs, **own, **options)


def as_states(case, entries, kind):
    """The states of a case as flash-linear-attention has them."""
    states = [entries[f"{kind}_{name}"] for name in STATES.get(case, ("state",))]
    if case == "normalized":
        states[1] = states[1][:, None]
    return tuple(states) if len(states) > 1 else states[0]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_states_are_those_of_the_naive_functions(case):
    entries = saved(case)
    if case == "retention":
        close(called(case, inputs_of(entries))[0], entries["out"])
        return
    before = as_states(case, entries, "initial")
    out, after = called(case, inputs_of(entries), initial_state=before, output_final_state=True)
    close(out, entries["out"])
    expected = as_states(case, entries, "final")
    if isinstance(expected, torch.Tensor):
        after, expected = (after,), (expected,)
    for found, own in zip(after, expected, strict=True):
        close(found, own)


@pytest.mark.parametrize("case", CASES)
def test_sequences_in_one_row_are_computed_apart(case):
    inputs = {name: x[:1, :13] for name, x in inputs_of(saved(case)).items()}
    out, after = called(case, inputs, cu_seqlens=CU_SEQLENS, output_final_state=True)
    for n, (start, end) in enumerate(pairwise(CU_SEQLENS)):
        alone = {name: x[:, start:end] for name, x in inputs.items()}
        own, state = called(case, alone, output_final_state=True)
        close(out[:, start:end], own)
        for found, expected in zip(_all(after), _all(state), strict=True):
            close(found[n : n + 1], expected)


def test_tokens_after_the_last_sequence_of_a_row_are_padding():
    inputs = {name: x[:1, :13] for name, x in inputs_of(saved("kda")).items()}
    bounds, end = CU_SEQLENS[:-1], int(CU_SEQLENS[-2])
    expected, _ = called("kda", {name: x[:, :end] for name, x in inputs.items()}, cu_seqlens=bounds)
    out, _ = called("kda", inputs, cu_seqlens=bounds)
    close(out[:, :end], expected)
    assert out.shape[1] == 13
    assert not out[:, end:].any()
    x, weight = torch.randn(1, 13, 6), torch.randn(6, 4)
    y, _ = causal_conv1d(x, weight, cu_seqlens=bounds)
    close(y[:, :end], causal_conv1d(x[:, :end], weight, cu_seqlens=bounds)[0])
    assert not y[:, end:].any()


def _all(states):
    return (states,) if isinstance(states, torch.Tensor) else states


def test_a_delta_rule_makes_its_gates_itself_if_it_is_asked():
    given = inputs_of(saved("kda"))
    rate, bias = torch.tensor([0.1, 0.5, 1.0, 2.0]), torch.randn(4 * 8)
    x = given["g"] + bias.view(4, 8)
    options = {"use_gate_in_kernel": True, "A_log": rate.log(), "dt_bias": bias}
    options |= {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    ready = {**given, "beta": given["beta"].sigmoid()}
    for name in ("q", "k"):
        ready[name] = torch.nn.functional.normalize(given[name], dim=-1)
    soft = {**ready, "g": -rate[:, None] * torch.nn.functional.softplus(x)}
    close(called("kda", given, **options)[0], called("kda", soft)[0])
    bounded = {**ready, "g": -2 * (rate[:, None] * x).sigmoid(), "beta": 2 * ready["beta"]}
    options |= {"lower_bound": -2.0, "allow_neg_eigval": True}
    close(called("kda", given, **options)[0], called("kda", bounded)[0])
    with pytest.raises(ValueError, match="A_log: the logarithm of a rate for each head expected"):
        called("kda", given, use_gate_in_kernel=True)


def test_a_state_may_have_its_values_first():
    inputs = inputs_of(saved("gla"))
    _, state = called("gla", inputs, output_final_state=True)
    out, turned = called(
        "gla", inputs, initial_state=state.mT, output_final_state=True, state_v_first=True
    )
    expected, after = called("gla", inputs, initial_state=state.clone(), output_final_state=True)
    close(out, expected)
    close(turned.mT, after)


def test_arguments_that_no_mechanism_has_are_refused():
    inputs = inputs_of(saved("gla"))
    with pytest.raises(ValueError, match="gv: not supported"):
        called("gla", inputs, gv=inputs["v"])
    with pytest.raises(ValueError, match="gk: a decay for each channel expected; found None"):
        called("gla", {name: inputs[name] for name in "qkv"})
    with pytest.raises(ValueError, match="reverse: not supported; found True"):
        called("delta", inputs_of(saved("delta")), reverse=True)


def convolved(x, weight, bias):
    """One sequence (t, channels) after its convolution."""
    width = weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    return silu(conv1d(padded.mT[None], weight[:, None], bias, groups=len(weight))[0].mT)


def test_convolutions_of_a_batch_and_of_sequences_in_one_row_and_from_states():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 13, 6), torch.randn(6, 4), torch.randn(6)
    whole = torch.stack([convolved(row, weight, bias) for row in x])
    y, state = causal_conv1d(x, weight, bias, output_final_state=True, activation="swish")
    close(y, whole)
    assert torch.equal(state, x[:, -4:].mT)
    first, state = causal_conv1d(x[:, :2], weight, bias, x[:, :2], None, True, "silu")
    close(first, whole[:, :2] + x[:, :2])
    second, state = causal_conv1d(x[:, 2:12], weight, bias, None, state, True, "silu")
    close(second, whole[:, 2:12])
    last, written = causal_conv1d_update(x[:, 12:], state, None, weight, bias, "silu")
    close(last, whole[:, 12:])
    assert written is state
    assert torch.equal(state, x[:, -4:].mT)
    row = x[:1]
    y, states = causal_conv1d(
        row, weight, bias, output_final_state=True, activation="silu", cu_seqlens=CU_SEQLENS
    )
    parts = row[0].split(CU_SEQLENS.diff().tolist())
    close(y[0], torch.cat([convolved(part, weight, bias) for part in parts]))
    assert torch.equal(states[1, :, -1], row[0, 4])
    assert not states[1, :, :-1].any()


def test_rotations_have_positions_of_each_sequence():
    torch.manual_seed(0)
    angles = torch.arange(30.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    cos, sin, x = angles.cos(), angles.sin(), torch.randn(1, 13, 2, 8)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x[..., :6].unflatten(-1, (3, 2)).contiguous())
    expected = torch.view_as_real(pairs * turns[2:15, None]).flatten(-2)
    found = rotary_embedding(x, cos, sin, interleaved=True, seqlen_offsets=2)
    close(found[..., :6], expected)
    assert torch.equal(found[..., 6:], x[..., 6:])
    whole = rotary_embedding(x, cos, sin, cu_seqlens=CU_SEQLENS, seqlen_offsets=torch.arange(3))
    for n, (start, end) in enumerate(pairwise(CU_SEQLENS)):
        assert torch.equal(
            whole[:, start:end], rotary_embedding(x[:, start:end], cos, sin, seqlen_offsets=n)
        )
    assert rotary_embedding(x, cos, sin, inplace=True) is x


def test_norms_return_the_sum_before_them_if_it_is_wanted():
    torch.manual_seed(0)
    x, residual, gate, weight = *torch.randn(3, 3, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x + residual, (8,), weight, 1e-5)
    y, total = rms_norm(x, weight, None, residual, prenorm=True)
    close(y, expected)
    close(total, x + residual)
    close(
        rms_norm_gated(x, gate, weight, None, "sigmoid", residual, eps=1e-5),
        expected * gate.sigmoid(),
    )
    with pytest.raises(ValueError, match="activation: 'swish' or 'sigmoid' expected"):
        rms_norm_gated(x, gate, weight, None, "relu")


def test_the_loss_takes_logits_or_hidden_states():
    torch.manual_seed(0)
    x, weight, labels = torch.randn(2, 5, 8), torch.randn(11, 8), torch.randint(11, (2, 5))
    labels[0, 0] = -100
    expected = torch.nn.functional.cross_entropy((x @ weight.T).reshape(10, 11), labels.flatten())
    close(CrossEntropy()(x @ weight.T, labels), expected)
    close(CrossEntropy()(x, labels, weight), expected)
