"""A user's file of `benchmark_cases` under pytest-benchmark. No test asserts a time."""

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
RESCALED = """
import precondattn as pa
from precondattn.runner import LeafRunner

class WrongRunner(LeafRunner):
    def forward(self, inputs, frame):
        out, residuals = super().forward(inputs, frame)
        return 1.01 * out, residuals

class Wrong(pa.Backend):
    name, only_by_name, libraries = "wrong", True, frozenset({"numpy"})

    def prepare(self, piece, request):
        return WrongRunner(piece, piece, differentiable=True)

class Declining(Wrong):
    name = "declining"

    def prepare(self, piece, request):
        return "knows nothing"

pa.register_backend(Wrong())
pa.register_backend(Declining())
"""
FILES = {
    "test_attention.py": a_file(SOFTMAX),
    "test_wrong.py": a_file(f'{NUMPY}, backends=["reference", "wrong", "declining"]', RESCALED),
    "test_no_fixture.py": a_file(NUMPY)
    .replace(", checked_attention", "")
    .replace("    benchmark(checked_attention)", "    pass"),
    "test_no_decorator.py": "def test_it(benchmark, checked_attention): pass\n",
}


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A folder with a saved run of these files, and what the run printed."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("timed")
    for name, text in FILES.items():
        written(folder, text, name)
    flags = ("--continue-on-collection-errors", "--benchmark-only", "--benchmark-save=cpu")
    done = pytest_run(folder, *flags)
    assert done.returncode == 1, done.stdout
    return folder, done.stdout


@pytest.fixture
def rows(timed):
    """The saved rows of the file of SOFTMAX."""
    return [
        row
        for row in saved(timed[0], "cpu")["benchmarks"]
        if "test_attention.py" in row["fullname"]
    ]


def test_parameters_are_texts_with_the_names_of_the_columns(rows):
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


def test_a_row_has_its_group_its_error_and_what_it_computes(rows, timed):
    """A peer is in the group of what it is compared with, and its name has another mechanism."""
    for row in rows:
        assert row["group"] == f"{row['params']['mechanism']} forward t=48,h=4,d=8 float32"
        extra = row["extra_info"]
        assert extra["error"] <= extra["bound"]
        assert extra["checked"] == "all tokens"
        assert extra["first_call_seconds"] > 0
        assert bool(extra["backends"]) != extra["is_peer"]
    peer = rows[-1]
    assert "lucid-torch-sdpa(softmax)-cpu" in peer["name"]
    assert peer["extra_info"]["computes"] == "softmax"
    described = saved(timed[0], "cpu")["machine_info"]["precondattn"]
    assert {"threads", "versions"} <= described.keys()


def test_a_wrong_result_is_not_timed_and_a_wrong_file_is_named(timed):
    folder, printed = timed
    for text in (
        "a wrong result is not timed",
        "knows nothing",
        "it has to take the fixtures benchmark",
        "has to be decorated with",
    ):
        assert text in printed
    assert "Traceback" not in printed
    assert "7 passed, 1 skipped" in printed
    rows = [r for r in saved(folder, "cpu")["benchmarks"] if "test_wrong.py" in r["fullname"]]
    assert [row["params"]["backend"] for row in rows] == ["reference"]


@pytest.mark.thorough
def test_saved_runs_are_compared_with_pytest_benchmark(timed, tmp_path):
    """The file of another device joins in the same groups, and rows are grouped by columns."""
    folder, _ = timed
    content = saved(folder, "cpu")
    for row in content["benchmarks"]:
        if row["params"]["library"] == "torch":
            row["params"]["device"] = "cuda"
            for text in ("name", "fullname", "param"):
                row[text] = row[text].replace("-cpu-", "-cuda-")
    (path,) = folder.glob(".benchmarks/*/0001_cpu.json")
    path.with_name("0002_gpu.json").write_text(json.dumps(content))
    done = run(folder, "pytest_benchmark", "compare", "0001", "0002", "--columns=median")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("benchmark '") == 2
    of_lucid = done.stdout.partition("benchmark 'lucid")[2].partition("benchmark '")[0]
    for name in ("cpu-forward-t=48,h=4,d=8] (0001_cpu", "cuda-forward-t=48,h=4,d=8] (0002_gpu"):
        assert name in of_lucid
    csv = tmp_path / "rows.csv"
    grouping = "--group-by=param:work,param:library"
    done = run(folder, "pytest_benchmark", "compare", "0001", grouping, f"--csv={csv}")
    assert "benchmark 'work=forward library=torch': 4 tests" in done.stdout
    assert all(f"param:{column}" in csv.read_text().splitlines()[0] for column in COLUMNS)
    chosen = ("test_attention.py", "--benchmark-only", "--benchmark-compare=0001", "-W", "default")
    done = pytest_run(folder, *chosen)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("(NOW)") == 6


WRONG_PEER = """
from precondattn_conformance.bench import peers
right = peers.sdpa()
made = peers.Computation("sdpa", peers.SOFTMAX, lambda q, k, v: 1.01 * right(q, k, v))
peers.PEERS = tuple(
    p._replace(make=lambda m, b: made) if p.name == "sdpa" else p for p in peers.PEERS)
"""
WORKS = [
    'mechanisms=["lucid", "gated_delta"], libraries=["torch", "jax"], works=["decode"]',
    'mechanisms=["ccq(gla)"], libraries=["jax"], works=["forward_backward"], peers=["base"]',
    '"packed_softmax"',
    '"overhead_lucid"',
]
OF_THE_PAGE = PAGE.read_text().partition("```python\n")[2].partition("```")[0]


@pytest.mark.thorough
def test_every_work_and_the_file_of_the_page_are_timed_beside_peers(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    assert len(OF_THE_PAGE.splitlines()) <= 10
    for number, text in enumerate((*map(a_file, WORKS), OF_THE_PAGE)):
        written(tmp_path, text, f"test_{number}.py")
    done = pytest_run(tmp_path, "--benchmark-only", "--benchmark-save=run")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
    rows = saved(tmp_path, "run")["benchmarks"]
    for number in range(1, 5):
        of_file = [row for row in rows if f"test_{number}.py" in row["fullname"]]
        assert any(row["extra_info"]["is_peer"] for row in of_file), number
    assert {row["params"]["library"] for row in of_file} == {"torch", "jax"}
    assert {"default", "sdpa"} <= {row["params"]["backend"] for row in of_file}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "before", "flag", "code", "says"),
    [
        (NUMPY.replace("[]", '["sdpa"]'), WRONG_PEER, "--benchmark-only", 0, "is off by"),
        (NUMPY, "", "--benchmark-disable", 0, "1 passed"),
        (
            NUMPY.replace("numpy", "torch"), "", "--precondattn-benchmark-device=banana", 2,
            "torch has no device 'banana' here",
        ),
    ],
    ids=["wrong peer", "checked only", "no device"],
)  # fmt: skip
def test_a_file_is_timed_checked_or_refused(tmp_path, arguments, before, flag, code, says):
    pytest.importorskip("torch")
    done = pytest_run(written(tmp_path, a_file(arguments, before)), flag)
    assert done.returncode == code, done.stdout
    assert says in done.stdout
    assert ("1 passed, 1 skipped" in done.stdout) == bool(before)


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
        ({"mechanisms": "lucid"}, r"mechanisms is a list of texts; write \['lucid'\]"),
        ({"names": ["memory_lucid"]}, "none of the requested cases is one of forward"),
        ({"mechanisms": ["lucid"], "backends": ["nobody"]}, "unknown backend 'nobody'"),
        ({"mechanisms": ["lucid"], "works": ["memory"]}, "'memory' is not timed by pytest-bench"),
        ({"mechanisms": ["lucid"], "peers": ["nobody"]}, "unknown peer 'nobody'"),
        ({"mechanisms": ["lucid"], "peers": ["naive_fla"]}, "naive_fla is no peer of lucid"),
        ({"mechanisms": ["lucid"], "peers": ["torch"]}, "'torch' is no peer here: add it to"),
    ],
)
def test_a_wrong_choice_is_refused_where_it_is_written(arguments, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        benchmark_cases(*arguments.pop("names", ()), **arguments)


def test_without_pytest_benchmark_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(command, "is_installed", lambda module: False)
    with pytest.raises(ImportError, match="with its extra 'bench'"):
        benchmark_cases(mechanisms=["lucid"])
