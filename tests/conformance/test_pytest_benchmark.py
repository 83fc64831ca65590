"""A user's file of `benchmark_cases` under pytest-benchmark: rows, groups, peers, comparison.

No test asserts a time.
"""

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")

import precondattn as pa
from precondattn_conformance import benchmark_cases, libraries
from precondattn_conformance.bench import command
from precondattn_conformance.bench.benchmark_cases import rows_of
from precondattn_conformance.bench.cases import Columns, layout, sizes_of
from precondattn_conformance.bench.peers import PEERS, peers_of
from precondattn_conformance.bench.selection import Selection

PAGE = Path(__file__).parents[2] / "docs" / "pytest_benchmark.md"
COLUMNS = ("mechanism", "library", "backend", "device", "work", "sizes", "dtype")


def run(folder, module, *arguments, **environment):
    environment = {**os.environ, "PYTEST_ADDOPTS": "", **environment}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pytest_run(folder, *arguments, **environment):
    """pytest in a folder of its own, on quick rows of few rounds."""
    quick = ("--precondattn-benchmark-quick", "--benchmark-max-time=0.01")
    isolated = ("-p", "no:cacheprovider", f"--rootdir={folder}", "-rs", "-W", "error")
    return run(folder, "pytest", *isolated, *quick, *arguments, **environment)


def written(folder, text, name="test_attention.py"):
    (folder / name).write_text(textwrap.dedent(text))
    return folder


def a_file(arguments, before=""):
    return (
        "from precondattn_conformance import benchmark_cases\n"
        f"{before}\n"
        f"@benchmark_cases({arguments})\n"
        "def test_attention(benchmark, checked_attention):\n"
        "    benchmark(checked_attention)\n"
    )


def saved(folder, name):
    (path,) = folder.glob(f".benchmarks/*/*_{name}.json")
    return json.loads(path.read_text())


SOFTMAX = 'mechanisms=["softmax", "lucid"], libraries=["torch", "numpy"], peers=["sdpa"]'
NUMPY = 'mechanisms=["softmax"], libraries=["numpy"], peers=[]'


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A folder with two saved runs of one file, the second as if it were another machine's."""
    folder = written(tmp_path_factory.mktemp("timed"), a_file(SOFTMAX))
    done = pytest_run(folder, "--benchmark-only", "--benchmark-save=cpu")
    assert done.returncode == 0, done.stdout
    content = saved(folder, "cpu")
    for row in content["benchmarks"]:
        if row["params"]["library"] == "torch":
            row["params"]["device"] = "cuda"
            for text in ("name", "fullname", "param"):
                row[text] = row[text].replace("-cpu-", "-cuda-")
    (path,) = folder.glob(".benchmarks/*/0001_cpu.json")
    path.with_name("0002_gpu.json").write_text(json.dumps(content))
    return folder


def test_parameters_are_texts_with_the_names_of_the_columns(timed):
    rows = saved(timed, "cpu")["benchmarks"]
    assert all(tuple(row["params"]) == COLUMNS for row in rows)
    assert [tuple(row["params"].values()) for row in rows] == [
        (mechanism, library, backend, "cpu", "forward", "t=48,h=4,d=8", "float32")
        for mechanism in ("softmax", "lucid")
        for library, backend in (("torch", "default"), ("numpy", "default"), ("torch", "sdpa"))
    ]
    names = [row["name"] for row in rows]
    assert names[0] == "test_attention[softmax-torch-default-cpu-forward-t=48,h=4,d=8]"
    assert len(set(names)) == len(names)
    assert "UNSERIALIZABLE" not in json.dumps(rows)


def test_a_peer_is_a_row_of_the_group_of_what_it_is_compared_with(timed):
    """Its name says what it computes, if that is another mechanism."""
    rows = saved(timed, "cpu")["benchmarks"]
    assert {row["group"] for row in rows} == {
        f"{mechanism} forward t=48,h=4,d=8 float32" for mechanism in ("softmax", "lucid")
    }
    (peer,) = (row for row in rows if row["params"]["mechanism"] == "lucid"
               and row["extra_info"]["is_peer"])  # fmt: skip
    assert peer["group"].startswith("lucid ")
    assert "lucid-torch-sdpa(softmax)-cpu" in peer["name"]
    assert peer["extra_info"]["computes"] == "softmax"


def test_what_was_checked_and_which_backends_ran_are_saved(timed):
    content = saved(timed, "cpu")
    for row in content["benchmarks"]:
        extra = row["extra_info"]
        assert extra["error"] <= extra["bound"]
        assert extra["checked"] == "all tokens"
        assert extra["first_call_seconds"] > 0
        assert bool(extra["backends"]) != extra["is_peer"]
    described = content["machine_info"]["precondattn"]
    assert {"threads", "versions"} <= described.keys()


def test_the_file_of_another_device_joins_in_the_same_groups(timed):
    done = run(timed, "pytest_benchmark", "compare", "0001", "0002", "--columns=median")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("benchmark '") == 2
    of_lucid = done.stdout.partition("benchmark 'lucid")[2].partition("benchmark '")[0]
    for name in ("cpu-forward-t=48,h=4,d=8] (0001_cpu", "cuda-forward-t=48,h=4,d=8] (0002_gpu"):
        assert name in of_lucid


@pytest.mark.thorough
def test_rows_are_grouped_and_written_by_their_columns(timed, tmp_path):
    done = run(timed, "pytest_benchmark", "compare", "0001", "--group-by=param:work,param:library",
               f"--csv={tmp_path / 'rows.csv'}")  # fmt: skip
    assert "benchmark 'work=forward library=torch': 4 tests" in done.stdout
    header, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert all(f"param:{column}" in header for column in COLUMNS)
    assert len(rows) == 6


@pytest.mark.thorough
def test_a_run_is_compared_with_a_saved_one(timed):
    done = pytest_run(timed, "--benchmark-only", "--benchmark-compare=0001", "-W", "default")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("(0001_cpu)") == 6
    assert done.stdout.count("(NOW)") == 6


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("pygal") is None, reason="pygal is not installed")
def test_each_group_has_a_histogram(tmp_path):
    """In a process of its own: pygal changes how modules are found."""
    written(tmp_path, a_file(SOFTMAX))
    done = pytest_run(tmp_path, "--benchmark-only", "--benchmark-histogram=drawn")
    assert done.returncode == 0, done.stdout
    drawn = sorted(path.name for path in tmp_path.glob("drawn*.svg"))
    assert drawn == [
        f"drawn-{mechanism}_forward_t=48,h=4,d=8_float32.svg" for mechanism in ("lucid", "softmax")
    ]
    assert "sdpa(softmax)" in (tmp_path / drawn[0]).read_text()


RESCALED = """
import precondattn as pa
from precondattn.backend import Backend
from precondattn.dispatch.discovery import register_backend
from precondattn.runner import LeafRunner

class WrongRunner(LeafRunner):
    def forward(self, inputs, frame):
        out, residuals = super().forward(inputs, frame)
        return 1.01 * out, residuals

class Wrong(Backend):
    name = "wrong"
    libraries = frozenset({"numpy"})

    def prepare(self, piece, request):
        return WrongRunner(piece, piece, differentiable=True)

register_backend(Wrong())
"""


WRONG_PEER = """
from precondattn_conformance.bench import peers
right = peers.sdpa()
made = peers.Computation("sdpa", peers.SOFTMAX, lambda q, k, v: 1.01 * right(q, k, v))
peers.PEERS = tuple(
    p._replace(make=lambda m, b: made) if p.name == "sdpa" else p for p in peers.PEERS)
"""
DECLINING = RESCALED.replace(
    "return WrongRunner(piece, piece, differentiable=True)", 'return "knows nothing"'
)


@pytest.mark.thorough(but=("wrong result", "without support"))
@pytest.mark.parametrize(
    ("arguments", "before", "flag", "code", "texts", "timed"),
    [
        (
            f'{NUMPY}, backends=["reference", "wrong"]', RESCALED, "--benchmark-only", 1,
            ("a wrong result is not timed",), ["reference"],
        ),
        (
            f'{NUMPY}, backends=["reference", "wrong"]', DECLINING, "--benchmark-only", 0,
            ("knows nothing", "1 passed, 1 skipped"), ["reference"],
        ),
        (
            NUMPY.replace("[]", '["sdpa"]'), WRONG_PEER, "--benchmark-only", 0,
            ("is off by", "1 passed, 1 skipped"), ["default"],
        ),
        (NUMPY, "", "--benchmark-disable", 0, ("1 passed",), None),
        (NUMPY, "", "--benchmark-skip", 0, ("1 skipped",), None),
        (
            NUMPY.replace("numpy", "torch"), "", "--precondattn-benchmark-device=banana", 2,
            ("torch has no device 'banana' here",), None,
        ),
    ],
    ids=["wrong result", "without support", "wrong peer", "checked only", "skipped", "no device"],
)  # fmt: skip
def test_a_row_is_timed_skipped_or_failed(tmp_path, arguments, before, flag, code, texts, timed):
    if "sdpa" in arguments or "torch" in arguments:
        pytest.importorskip("torch")
    written(tmp_path, a_file(arguments, before))
    saving = () if timed is None else ("--benchmark-save=run",)
    done = pytest_run(tmp_path, flag, *saving)
    assert done.returncode == code, done.stdout
    for text in texts:
        assert text in done.stdout
    if timed is not None:
        rows = saved(tmp_path, "run")["benchmarks"]
        assert [row["params"]["backend"] for row in rows] == timed


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        'mechanisms=["lucid", "gated_delta"], libraries=["torch", "jax"], works=["decode"]',
        'mechanisms=["ccq(gla)"], libraries=["jax"], works=["forward_backward"], peers=["base"]',
        '"packed_softmax"',
        '"overhead_lucid"',
    ],
    ids=["decode", "backward", "packed", "overhead"],
)
def test_every_work_is_timed_beside_its_peers(arguments, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    written(tmp_path, a_file(arguments))
    done = pytest_run(tmp_path, "--benchmark-only", "--benchmark-save=run")
    assert done.returncode == 0, done.stdout
    rows = saved(tmp_path, "run")["benchmarks"]
    assert any(row["extra_info"]["is_peer"] for row in rows) or "gated_delta" in arguments
    assert "skipped" not in done.stdout, done.stdout


def test_a_library_without_the_device_is_left_out_and_numpy_stays_on_a_cpu(monkeypatch):
    def only_torch(names, device):
        for name in names:
            if name == "jax" and device == "cuda":
                raise ValueError("jax has no device 'cuda' here")

    monkeypatch.setattr(libraries, "require_device", only_torch)
    monkeypatch.setattr(libraries.JaxLibrary, "is_installed", classmethod(lambda cls: True))
    monkeypatch.setattr(libraries.TorchLibrary, "is_installed", classmethod(lambda cls: True))
    selection = Selection(mechanisms=("softmax",), libraries=("torch", "jax", "numpy"), peers=())
    rows = rows_of.__wrapped__(selection, "cuda")
    assert [(row.columns.library, row.columns.device, row.lack) for row in rows] == [
        ("torch", "cuda", ""),
        ("jax", "cuda", "jax has no device 'cuda' here"),
        ("numpy", "cpu", ""),
    ]
    assert len({row.columns.group for row in rows}) == 1


def test_by_default_peers_are_those_of_other_projects_that_can_run_here():
    (case,) = Selection(mechanisms=("lucid",)).cases()
    rows = rows_of(Selection(mechanisms=("lucid",)))
    peers = {row.columns.backend for row in rows if row.peer}
    assert not peers & {"base", "torch", "cudnn", "flash_sdpa"}
    assert peers <= {peer.name for peer in peers_of(case)}
    if find_spec("torch"):
        assert {"sdpa", "naive_lucid"} <= peers
    named = rows_of(Selection(mechanisms=("lucid",), peers=("flash_sdpa", "base")))
    assert {row.columns.backend: bool(row.lack) for row in named if row.peer} == {
        "flash_sdpa": True,
        "base": not find_spec("torch"),
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        # A peer that several libraries share is one row.
        ({"peers": ("sdpa",)}, [("torch", "default"), ("numpy", "default"), ("torch", "sdpa")]),
        # A backend has rows on its own libraries.
        (
            {"peers": (), "backends": ("torch", "portable", "default")},
            [("torch", "torch"), ("torch", "default"), ("numpy", "portable"), ("numpy", "default")],
        ),
    ],
    ids=["shared peer", "own libraries"],
)
def test_rows_of_several_libraries(choice, expected):
    pytest.importorskip("torch")
    rows = rows_of(Selection(mechanisms=("lucid",), libraries=("torch", "numpy"), **choice))
    assert [(row.columns.library, row.columns.backend) for row in rows] == expected


def test_what_a_peer_computes_is_what_it_is_said_to_compute():
    pytest.importorskip("torch")
    names = ("sdpa", "flash_sdpa", "base", "gated_delta", "kda")
    for expression in ("lucid", "lucid(softmax[causal=false])", "kda", "gdn2", "ccq(gla)"):
        mechanism = pa.parse(expression)
        for peer in PEERS:
            if peer.fits(mechanism) and peer.name in names:
                made = peer.make(mechanism, None).mechanism
                assert str(peer.computes(mechanism)) == str(made), (peer.name, expression)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (layout(t=64, h=4, d=8), "t=64,h=4,d=8"),
        (layout(t=64, h=4, n=2, d=8, e=16)._replace(b=3), "b=3,t=64,h=4,n=2,d=8,e=16"),
    ],
)
def test_sizes_are_written_as_they_are_given(sizes, text):
    (case,) = Selection(mechanisms=("lucid",), sizes=(text,)).cases()
    assert sizes_of(case) == text
    assert case.layout == sizes
    (slots,) = Selection(mechanisms=("gsa",), sizes=("t=64,m=16",)).cases()
    assert sizes_of(slots) == "t=64,h=8,d=64,m=16"


def test_the_dtype_is_in_the_name_if_it_is_not_the_usual_one():
    half = Columns("lucid", "torch", "default", "cpu", "forward", "t=8", "bfloat16")
    assert half.id() == "lucid-torch-default-cpu-forward-t=8-bfloat16"
    assert half._replace(dtype="float32").id() == "lucid-torch-default-cpu-forward-t=8"
    assert half.group == "lucid forward t=8 bfloat16"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "name cases, or mechanisms"),
        ({"mechanisms": ["lucit"]}, "lucit"),
        ({"mechanisms": ["lucid"], "libraries": ["tensorflow"]}, "unknown array library"),
        ({"mechanisms": ["lucid"], "backends": ["nobody"]}, "unknown backend 'nobody'"),
        ({"mechanisms": ["lucid"], "works": ["memory"]}, "'memory' is not timed by pytest-bench"),
        ({"mechanisms": ["lucid"], "sizes": ["t=many"]}, "sizes are written as"),
        ({"mechanisms": ["lucid"], "peers": ["nobody"]}, "unknown peer 'nobody'"),
        ({"mechanisms": ["lucid"], "peers": ["naive_fla"]}, "naive_fla is no peer of lucid"),
        ({"mechanisms": ["lucid"], "peers": ["torch"]}, "'torch' is no peer here: add it to"),
    ],
)
def test_a_wrong_choice_is_refused_where_it_is_written(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        benchmark_cases(**arguments)


def test_a_text_in_place_of_a_list_is_refused():
    with pytest.raises(TypeError, match=r"mechanisms is a list of texts; write \['lucid'\]"):
        benchmark_cases(mechanisms="lucid")
    with pytest.raises(ValueError, match="none of the requested cases is one of forward"):
        benchmark_cases("memory_lucid")


def test_without_pytest_benchmark_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(command, "is_installed", lambda module: False)
    with pytest.raises(ImportError, match="with its extra 'bench'"):
        benchmark_cases(mechanisms=["lucid"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (a_file(NUMPY).replace(", checked_attention", ""), "it has to take the fixtures benchmark"),
        ("def test_it(benchmark, checked_attention): pass\n", "has to be decorated with"),
    ],
    ids=["without the fixture", "without the decorator"],
)
def test_the_decorator_and_the_fixture_belong_together(tmp_path, text, complaint):
    written(tmp_path, text.replace("    benchmark(checked_attention)", "    pass"))
    done = pytest_run(tmp_path)
    assert complaint in done.stdout
    assert "Traceback" not in done.stdout
    assert done.returncode == 2


@pytest.mark.thorough
def test_the_file_of_the_page_runs(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    text = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    assert len(text.splitlines()) <= 10
    written(tmp_path, text)
    done = pytest_run(tmp_path, "--benchmark-only", "--benchmark-autosave")
    assert done.returncode == 0, done.stdout
    rows = saved(tmp_path, "*")["benchmarks"]
    assert {row["params"]["library"] for row in rows} == {"torch", "jax"}
    assert {"default", "sdpa"} <= {row["params"]["backend"] for row in rows}
