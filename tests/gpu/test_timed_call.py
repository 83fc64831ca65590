"""Headlines: inputs made on the device, and the compared and timed calls."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import precondattn as pa
from precondattn_conformance.bench.computation import ours
from precondattn_conformance.bench.correct import WrongResultError
from precondattn_conformance.inputs import CallLayout
from precondattn_gpu import device_inputs, first_tokens
from precondattn_gpu.device_clock import TorchClock, in_turns
from precondattn_gpu.device_inputs import OnDevice
from precondattn_gpu.first_tokens import FirstTokens, check_step

LAYOUT = CallLayout("headline", b=2, t=24, s=24, h=4, n=2, d=8, e=8, m=4, values_per_head=1)


def inputs(name, dtype="float32", layout=LAYOUT):
    return device_inputs.make(pa.parse(name), layout, dtype, "cpu")


@pytest.mark.parametrize("name", ["kda", "path", "gla", "lucid[beta=true]", "gsa"])
def test_inputs_are_in_their_declared_ranges(name):
    mechanism, x = pa.parse(name), inputs(name)
    assert {n: tuple(a.shape) for n, a in x.items()} == {
        n: p.shape(LAYOUT.sizes) for n, p in mechanism.inputs.items()
    }
    for key, pattern in mechanism.inputs.items():
        if pattern.low is not None:
            assert float(x[key].min()) >= pattern.low
        if pattern.high is not None:
            assert float(x[key].max()) <= pattern.high
        if pattern.unit:
            torch.testing.assert_close(x[key].norm(dim=-1), torch.ones(x[key].shape[:-1]))


def test_keys_are_clustered_and_queries_near_them():
    x = inputs("lucid", layout=LAYOUT._replace(d=64, e=64))
    k = torch.nn.functional.normalize(x["k"][0, :, 0], dim=-1)
    cosines = (k @ k.T)[~torch.eye(24, dtype=torch.bool)]
    assert int((cosines > 0.95).sum()) == 3 * 8 * 7  # Three clusters of eight.
    q = torch.nn.functional.normalize(x["q"][0, :, 0], dim=-1)
    assert float((q @ k.T).max(dim=1).values.min()) > 0.9


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(first_tokens, "FIRST", 10)


@pytest.mark.parametrize("name", ["lucid", "gated_delta", "laser"])
def test_a_right_call_has_a_small_error_in_its_output_and_gradients(few, name):
    mechanism, x = pa.parse(name), inputs(name)
    expected = FirstTokens(mechanism, x, "float32")
    out, pullback = mechanism.vjp(**x)
    checked = expected.check(out, pullback(expected.cotangent))
    assert 0 < checked.error < checked.bound
    assert checked.what == "the first 10 tokens, in float32"


@pytest.mark.parametrize(
    ("what", "name", "index", "value"),
    [
        ("the output is off", "out", (1, 9, 3), 9.0),
        ("the gradient of k is off", "k", (1, 0), 9.0),
        ("the gradient of v, not zero later", "v", (0, 15), 1e-3),
        ("the output, which is not finite", "out", (0, 20), torch.nan),
    ],
)
def test_what_is_wrong_is_named(few, what, name, index, value):
    mechanism, x = pa.parse("lucid"), inputs("lucid")
    expected = FirstTokens(mechanism, x, "float32")
    out, pullback = mechanism.vjp(**x)
    results = {"out": out.clone(), **pullback(expected.cotangent)}
    results[name][index] = value
    with pytest.raises(WrongResultError, match=what):
        expected.check(results.pop("out"), results)


def test_a_token_after_a_cache_is_compared_on_the_same_cache():
    mechanism = pa.parse("lucid")
    x = inputs("lucid")
    of = ours(mechanism, "torch")
    decoder = of.decoder(OnDevice("cpu"), "float32", x)
    decoder.fill()

    def step():
        decoder.reset()
        return decoder.step()

    assert check_step(of, decoder, step, "float32").error < 1e-5
    with pytest.raises(WrongResultError, match="the token after 23 others"):
        check_step(of, decoder, lambda: step() * 1.1, "float32")


def test_calls_are_timed_in_turns():
    order = []
    clock = TorchClock("cpu")
    calls = {name: (clock, lambda name=name: order.append(name)) for name in ("ours", "peer")}
    times = in_turns(calls, rounds=3)
    assert {name: len(each) for name, each in times.items()} == {"ours": 3, "peer": 3}
    rounds = order[4:]  # Before them are one call without a clock, and one to determine the count.
    changes = sum(a != b for a, b in pairwise(rounds))
    assert changes == 5


@pytest.mark.thorough
def test_a_headline_has_rows_with_ratios_and_reasons(tmp_path):
    pytest.importorskip("triton", minversion="3.6")
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "precondattn_gpu.timed_call", "triton", "lucid"]
    command += ["b=1,t=20,h=2,n=1,d=16", "--work", "forward", "--work", "decode"]
    command += ["--peer", "sdpa", "--peer", "flash_sdpa", "--dtype", "float32"]
    command += ["--device", "cpu", "--rounds", "2", "--result", str(result)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(result.read_text())
    for row in content["rows"]:
        assert row["status"] == "timed"
        assert "triton" in row["backends"]
        assert row["ratios"]["sdpa"]["median"] > 0
        assert "kernel for GPUs" in row["absent_peers"]["flash_sdpa"]
