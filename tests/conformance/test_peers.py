"""Each peer of the benchmarks runs on a CPU if it can; else its function's demands are checked."""

import importlib
import inspect
import io
import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from rich.console import Console

import precondattn as pa
from precondattn_conformance.bench import command, measure, peers
from precondattn_conformance.bench.cases import BenchCase, layout
from precondattn_conformance.bench.peers import FLA, KERNELS
from precondattn_conformance.bench.record import load
from precondattn_conformance.inputs import make_inputs
from precondattn_conformance.peers import project
from tests.conformance import fla_stub

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
GROUPED = layout(t=20, h=4, n=2, d=16)._replace(values_per_head=2)

ON_A_CPU = {
    "sdpa": "laser",
    "masked_sdpa": "window_backward",
    "xla": "jax_softmax",
    "naive_lucid": "lucid_naive",
    "transformers": "gated_delta",
    "base": "numpy_lucid",
    "gated_delta": "comba",
    "kda": "gdn2",
    "batch": "packed_softmax",
    "torch": "jax_path",
}
"""The case with which each peer is measured."""
ELSEWHERE = {
    "flash_sdpa": "test_a_kernel_of_pytorch_is_the_only_one_allowed",
    "cudnn_sdpa": "test_a_kernel_of_pytorch_is_the_only_one_allowed",
    "cudnn": "test_cudnn_of_jax_gets_what_it_demands",
    "fla": "test_kernels_of_fla_get_what_they_demand",
    "naive_fla": "test_a_naive_reference_is_loaded_by_its_file_and_compared",
}
"""The tests that cover the other peers."""


def of_name(name):
    (peer,) = (peer for peer in peers.PEERS if peer.name == name)
    return peer


def checked(peer, mechanism, sizes, work="forward", dtype="bfloat16", library="torch"):
    """The largest error of a peer; raises the peer's error, or one for a wrong result."""
    case = BenchCase(mechanism, mechanism, work, sizes, library, dtype)
    return measure.checked_run(peer.make(pa.parse(mechanism), None), case).checked.error


def rows_of(folder, *names, **options):
    """The rows of a quick run in this process, which has to succeed."""
    saved, console = folder / "run.json", Console(file=io.StringIO())
    options |= {"quick": True, "rounds": 2, "save": saved, "console": console}
    assert command.bench(names=names, **options) == 0
    return load(saved).rows


def test_every_peer_is_tested_and_on_the_page():
    names = {peer.name for peer in peers.PEERS}
    assert names == ON_A_CPU.keys() | ELSEWHERE.keys()
    table = PAGE.read_text().partition("| peer |")[2].partition("\n\n")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    assert set(re.findall(r"`(\w+)`", " ".join(first))) == names


@pytest.mark.thorough(but=("naive_lucid-lucid_naive",))
@pytest.mark.parametrize(("name", "case"), ON_A_CPU.items())
def test_a_peer_runs_beside_its_mechanism(name, case, tmp_path):
    for library in {"transformers", "jax"} & {name, case.partition("_")[0]}:
        pytest.importorskip(library)
    (row,) = rows_of(tmp_path, case, peers=(name,))
    assert not row.absent_peers
    assert row.ratios[name]["median"] > 0


@pytest.mark.parametrize(
    ("name", "enabled"), [("flash_sdpa", "flash_sdp"), ("cudnn_sdpa", "cudnn_sdp")]
)
def test_a_kernel_of_pytorch_is_the_only_one_allowed(monkeypatch, name, enabled):
    whole, kinds = torch.nn.functional.scaled_dot_product_attention, torch.backends.cuda
    switches = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")

    def demanding(q, k, v, is_causal, enable_gqa):
        on = [switch for switch in switches if getattr(kinds, f"{switch}_enabled")()]
        assert on == [enabled]
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.shape[1] == 4
        assert k.shape == v.shape
        assert k.shape[1] == 2
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        kinds.enable_math_sdp(True)
        return whole(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", demanding)
    assert checked(of_name(name), "softmax", GROUPED) > 0


def test_cudnn_of_jax_gets_what_it_demands(monkeypatch):
    jax = pytest.importorskip("jax")
    whole = jax.nn.dot_product_attention

    def demanding(q, k, v, *, is_causal, implementation):
        assert implementation == "cudnn"
        assert q.dtype == k.dtype == v.dtype == jax.numpy.bfloat16
        assert q.shape[2] % k.shape[2] == 0
        assert q.shape[3] % 8 == 0
        return whole(q, k, v, is_causal=is_causal, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", demanding)
    assert checked(of_name("cudnn"), "softmax", GROUPED, library="jax") > 0


@pytest.mark.parametrize("work", ["forward", "forward_backward"])
@pytest.mark.parametrize("name", FLA)
def test_kernels_of_fla_get_what_they_demand(monkeypatch, name, work):
    fla_stub.install(monkeypatch)
    sizes = GROUPED._replace(d=128, e=128) if name == "gated_delta" else GROUPED
    assert checked(of_name("fla"), name, sizes, work) > 0


def test_a_gated_gradient_on_hopper_is_refused_where_tiles_are_wrong(monkeypatch):
    """Keys of at most 64 channels use the tiles of fla's issue 640, whatever ran before."""
    fla_stub.install(monkeypatch)
    for width in (128, 64):
        sizes = GROUPED._replace(d=width, e=width)
        if width == 64:
            with pytest.raises(RuntimeError, match="on Hopper GPUs"):
                checked(of_name("fla"), "gated_delta", sizes, "forward_backward")
        else:
            checked(of_name("fla"), "gated_delta", sizes, "forward_backward")


def test_the_lack_of_a_kernel_of_fla_is_named(monkeypatch):
    monkeypatch.setattr(project, "version", lambda name: "0")
    case = BenchCase("delta", "delta", "forward", GROUPED)
    assert "kernel_delta does not support float32" in KERNELS.lack(case, "cuda")
    assert "needs arrays on cuda; found cpu" in KERNELS.lack(case, "cpu")
    assert "not in decode" in KERNELS.lack(replace(case, work="decode"), "cuda")
    assert KERNELS.lack(BenchCase("kda", "kda", "forward", GROUPED), "cuda") == ""

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(project, "version", absent)
    assert "is not installed" in KERNELS.lack(case, "cuda")


def test_a_kernel_of_fla_is_not_compared_without_its_device(monkeypatch):
    """The backend declines before the kernel is called, so no module of fla is needed."""
    monkeypatch.setattr(project, "version", lambda name: "0")
    backend = KERNELS.adapter(pa.KDA()).backend()
    shapes = {name: a.shape for name, a in make_inputs(pa.KDA(), GROUPED, "random", seed=0).items()}
    on_a_cpu = pa.Request("forward", "torch", "cpu", "float32", tuple(shapes.items()), frozenset())
    assert backend.refusal(pa.KDA(), on_a_cpu) == "needs arrays on cuda; found cpu"
    on_a_gpu = replace(on_a_cpu, device="cuda")
    assert not backend.lacks(pa.KDA(), on_a_gpu)


@pytest.mark.thorough
def test_the_rule_of_transformers_is_plain_pytorch_where_fla_is_installed(monkeypatch):
    kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    name = "torch_chunk_gated_delta_rule"
    fla_stub.install(monkeypatch)
    installed = sys.modules["fla.ops.gated_delta_rule"]
    monkeypatch.setattr(installed, "chunk_gated_delta_rule", fla_stub.without_a_driver)
    decorate = kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
    monkeypatch.setattr(module, name, decorate(inspect.unwrap(getattr(module, name))))
    with pytest.raises(RuntimeError, match="0 active drivers"):
        getattr(module, name)(None)
    assert checked(of_name("transformers"), "gated_delta", GROUPED, dtype="float32") > 0
