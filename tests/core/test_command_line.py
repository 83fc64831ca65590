"""Commands of `precondattn`: what they print, what they refuse, and their exit codes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import precondattn as pa
from precondattn.command_line import commands, listing
from precondattn.dispatch.described import explain_described

NO_INTERPRETERS = {"TRITON_INTERPRET": "0", "PRECONDATTN_CUPY_SIMULATE": "0"}
"""The environment of a user: kernels need a device."""
TRUSTING = {"PRECONDATTN_TRUST_KERNELS": "1"}
"""Kernels that have not run on a device are chosen too."""

THIRD_PARTY = Path(__file__).parents[1] / "third_party"


MAIN = "from precondattn.command_line.cli import main; main()"


def precondattn(*arguments, program=MAIN, **environment):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding=environment.get("PYTHONIOENCODING"),
        timeout=300,
        check=False,
    )


def invoked(*arguments):
    """What a command prints in this process."""
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.thorough(but=("bench --help-cp1252",))
@pytest.mark.parametrize(
    ("command", "encoding"), [("bench --help", "cp1252"), ("explain ccq(gla)", "ascii")]
)
def test_commands_print_to_a_pipe_without_utf_8(command, encoding):
    done = precondattn(*command.split(), PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def mine(tmp_path):
    """A folder with a package whose import fails with text that looks like markup."""
    (tmp_path / "mine.py").write_text("raise ImportError('no [/red] [bold]licence :smile:')\n")
    metadata = tmp_path / "mine-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0\n")
    groups = "[precondattn.backends]\nmine = mine:A\n[precondattn.mechanisms]\nmine = mine:B\n"
    (metadata / "entry_points.txt").write_text(groups)
    return tmp_path


def test_list_names_mechanisms_and_backends_with_their_errors_and_foreign_text_as_it_is(mine):
    path = os.pathsep.join([str(THIRD_PARTY), str(mine)])
    done = precondattn("list", PYTHONPATH=path, PYTHONIOENCODING="cp1252")
    assert done.returncode == 0, done.stderr
    for text in ("lucid", "q (b t h d)", "reference", "third_party", "could not be imported"):
        assert text in done.stdout
    assert done.stdout.count("no [/red] [bold]licence :smile:") == 2
    done = precondattn("explain", "lucid", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "mine could not be imported: ImportError: no [/red] [bold]licence" in done.stdout


def test_explain_names_the_backend_of_every_group():
    pytest.importorskip("torch")
    said = invoked("explain", "lucid(laser)", "--library", "torch", "--verb", "extend")
    assert "lucid(laser): extend of torch float32 on cpu" in said
    assert "softmax[read=log_mean_exp]  [out]: torch" in said


def test_a_plan_for_a_library_that_is_not_installed_says_so():
    if find_spec("cupy") is not None:
        pytest.skip("cupy is installed")
    said = invoked("explain", "lucid", "--library", "cupy")
    assert "lucid: forward of cupy float32 on cuda" in said
    assert said.endswith("cupy is not installed here\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("library", "device", "verb", "kernels"),
    [
        ("torch", "cuda:1", "forward", "triton"),
        ("jax", "cuda", "extend", "pallas"),
        ("jax", "tpu", "vjp", "pallas"),
    ],
)
def test_explain_answers_for_a_device_that_is_not_here_and_says_how_to_ask_for_kernels(
    library, device, verb, kernels
):
    if library == "torch":
        pytest.importorskip("triton", minversion="3.6")
    else:
        pytest.importorskip(library)
    described = ("explain", "lucid", "--library", library, "--device", device, "--verb", verb)
    sizes = ("--sizes", "t=1,s=128") if verb == "extend" else ()
    done = precondattn(*described, *sizes, **NO_INTERPRETERS, **TRUSTING)
    assert done.returncode == 0, done.stderr
    kind = device.partition(":")[0]
    assert done.stdout.startswith(f"lucid: {verb} of {library} float32 on {kind}\n")
    assert f": {kernels} (" in done.stdout.partition("not chosen")[0]
    assert not done.stderr
    if device != "tpu":
        chosen, _, refused = precondattn(*described[:6], **NO_INTERPRETERS).stdout.partition(
            "not chosen"
        )
        assert f": {library} (" in chosen
        assert kernels not in chosen
        assert f"{kernels} for lucid_solve: its kernels have not yet run" in refused
        assert "PRECONDATTN_TRUST_KERNELS=1" in refused


def test_the_version_is_printed():
    assert invoked("--version") == f"precondattn {pa.__version__}\n"


def test_lists_and_plans_are_data_on_request_and_lines_in_a_pipe():
    listed = json.loads(invoked("list", "--json"))
    assert {each["name"] for each in listed["mechanisms"]} == {*pa.mechanisms()}
    (softmax,) = (each for each in listed["mechanisms"] if each["name"] == "softmax")
    assert softmax["inputs"]["k"] == "b s n d"
    assert listed["backends"][-1] == {"name": "reference", "libraries": [], "made_for": []}
    lines = invoked("list").splitlines()
    assert not any(set(line) & set("│┃━─") for line in lines)
    assert sum(line.startswith("lucid ") for line in lines) == 1
    plan = json.loads(invoked("explain", "lucid", "--json"))
    assert [each["backend"] for each in plan["pieces"]] == ["portable", "portable"]
    assert "refusals" in plan


def test_explain_lists_backends_of_other_libraries_only_if_asked():
    short = invoked("explain", "lucid")
    assert "supports arrays of jax" not in short
    assert "for other array libraries: " in short
    assert "no fused kernel: the 2 pieces run separately" in short
    everything = invoked("explain", "lucid", "--all")
    assert "jax for lucid_solve: supports arrays of jax, not of numpy" in everything


def test_explain_keeps_the_defaults_of_sizes_that_are_not_named():
    def shapes(verb="forward", **sizes):
        explained = explain_described(pa.Lucid(), "numpy", "float32", None, verb, sizes)
        return dict(explained.request.shapes)

    assert shapes() == dict.fromkeys("qkv", (1, 128, 4, 64))
    assert shapes(t=4096) == dict.fromkeys("qkv", (1, 4096, 4, 64))
    assert shapes(h=6, d=32) == dict.fromkeys("qkv", (1, 128, 6, 32))
    assert shapes(s=7)["k"] == (1, 7, 4, 64)
    assert shapes("extend", t=1, s=4096) == dict.fromkeys("qkv", (1, 1, 4, 64))


def test_bench_keeps_the_sizes_that_are_not_named():
    from precondattn_conformance.bench.cases import layout
    from precondattn_conformance.bench.selection import with_sizes

    assert with_sizes(layout(t=2048, d=128), "t=64") == layout(t=64, d=128)


RECORD = '{"format": 1, "date": "", "machine": {}, "rates": [], "rows": []}'
FILES = {
    "run": RECORD,
    "empty": "",
    "list": "[]",
    "deep": "[" * 100_000,
    "no_rows": '{"format": 1, "rows": 3}',
    "no_machine": '{"format": 1, "date": "", "machine": 3, "rows": []}',
    "schema": '{"schema": "precondattn-conformance/1"}',
}
BAD = {
    "explain": (
        *("lucid(", "lucid[eps=[/red]]", "softmax[causal=false] --verb extend"),
        "elu1(" * 10_000 + "linear" + ")" * 10_000,
    ),
    "explain lucid": (
        *("--library nope", "--library torch --device banana", "--dtype int8", "--verb nope"),
        *("--verb extend_vjp", "--sizes t=", "--sizes t", "--sizes t=-1", "--sizes z=3"),
        *("--sizes h=6,n=4", "--sizes t=999999999999999999999999999999"),
    ),
    "compare": (
        *(f"{name} {name}" for name in ("folder", "binary", *FILES) if name != "run"),
        *("run run --threshold nan", "run run --growth 0"),
    ),
    "new-backend": (
        *("Bad|Name", "class", "torch", "mine --library nope", "mine --directory binary"),
        "mine --directory binary/inside",
    ),
    "conformance": (
        *("--backend nobody", "--level huge", "--library nope", "--mechanism nope", "--check nope"),
        *("--dtype nope", "--case nope", "--xfail missing", "--skip binary", "--record folder"),
        *("--html folder", "--junit folder"),
        "--mechanism lucid --library torch --device banana",
    ),
    "bench": ("nope", "lucid --mechanism lucid"),
    "bench --quick --mechanism lucid": (
        *("--library nope", "--device banana", "--dtype int8", "--work nope", "--peer nope"),
        *("--backend nobody", "--rounds 0", "--sizes h=3,n=2", "--save folder", "--plot binary"),
        "--benchmark-json folder",
    ),
}


@pytest.mark.thorough(but=("conformance --skip binary", "explain lucid("))
@pytest.mark.parametrize(
    "command",
    [f"{command} {rest}" for command, of_command in BAD.items() for rest in of_command],
    ids=lambda command: command[:60],
)
def test_bad_input_of_a_command_has_a_message_and_no_traceback(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    for name, text in FILES.items():
        Path(name).write_text(text)
    arguments = [word.replace("|", " ") for word in command.split()]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.output.strip()
    assert "Error:" not in result.output  # The type of an error is shown if it is unexpected.


def test_an_unexpected_error_is_one_line_and_its_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setattr(listing, "data", Mock(side_effect=ZeroDivisionError("by zero")))
    result = CliRunner().invoke(commands.app, ["list"])
    assert result.exit_code == 2
    assert result.output == "ZeroDivisionError: by zero (PRECONDATTN_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("PRECONDATTN_TRACEBACK", "1")
    assert isinstance(CliRunner().invoke(commands.app, ["list"]).exception, ZeroDivisionError)


def test_two_equal_records_of_benchmarks_are_no_regression(tmp_path):
    record = tmp_path / "run"
    record.write_text(RECORD)
    invoked("compare", str(record), str(record))


def test_without_typer_the_command_line_says_what_to_install():
    done = precondattn("list", program=f"import sys; sys.modules['typer'] = None; {MAIN}")
    assert done.returncode == 2
    assert done.stderr == (
        "precondattn: the command line needs typer, which is not installed; "
        "install precondattn with its extra 'conformance'\n"
    )
