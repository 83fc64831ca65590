"""Compiling CUDA kernels without a GPU: reports and failures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from precondattn_kernel_tools import cuda_toolkit, nvrtc
from precondattn_kernel_tools.cuda_compiler import Variant, compile_variant
from precondattn_kernel_tools.cuda_toolkit import MissingToolError
from tests.kernel_tools.toolchain import needs_nvrtc

ROOT = Path(__file__).parents[2]
EXAMPLES = "tests.kernel_tools.cuda_examples.variants"


def compiler(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "precondattn_kernel_tools.cuda_compiler", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The finished process that compiled every example, and its report by name."""
    path = tmp_path_factory.mktemp("cuda") / "report.json"
    done = compiler(EXAMPLES, "--target=sm_80", "--target=sm_90", "--jobs=1", f"--save={path}")
    assert path.exists(), done.stderr
    report = json.loads(path.read_text())
    assert set(report) == {"nvrtc", "python", "variants"}
    assert report["nvrtc"] == nvrtc.version()
    return done, {(result["name"], result["target"]): result for result in report["variants"]}


@pytest.mark.thorough(but=("8-__half-sm_90", "8-__nv_bfloat16-sm_90"))
@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["__half", "__nv_bfloat16", "float", "double"])
@pytest.mark.parametrize("tile", [8, 16])
def test_the_report_has_the_resources_of_a_kernel_that_compiles_and_fits(
    everything, dtype, tile, target
):
    done, variants = everything
    result = variants[f"product<{dtype}, {tile}>", target]
    assert result["failures"] == []
    assert 0 < result["registers"] <= 255
    assert result["spilt_bytes"] == 0
    size = {"double": 8, "float": 4}.get(dtype, 2)
    assert result["shared_bytes"] == 2 * tile * tile * size
    assert result["seconds"] > 0
    assert f"product<{dtype}, {tile}>" in done.stdout


@needs_nvrtc
def test_a_kernel_without_a_template_is_compiled_by_its_name(everything):
    result = everything[1]["grid total", "sm_90"]
    assert result["failures"] == []
    assert result["registers"] > 0


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("spills", "bytes (at most 0)"),
        ("too many registers", "registers for 1024 threads, of 65536"),
        ("has no such name", 'kernel.cu(2): error: identifier "INFINITY" is undefined'),
        ("has no such file", "absent.cu"),
        ("has no such kernel", "product<float, 8, 8>"),
        ("has no such option", "--absent"),
        ("static is too large", "65536 bytes of shared memory are declared, of 49152"),
    ],
)
def test_a_kernel_that_does_not_compile_or_fit_is_a_failure(everything, name, failure):
    done, variants = everything
    assert done.returncode == 1
    (message,) = variants[name, "sm_80"]["failures"]
    assert failure in message
    assert failure in done.stdout


@needs_nvrtc
def test_the_limits_of_the_variant_and_of_the_target_hold(everything):
    variants = everything[1]
    assert variants["may spill", "sm_80"]["failures"] == []
    assert variants["may spill", "sm_80"]["spilt_bytes"] > 0
    assert variants["few threads", "sm_80"]["failures"] == []
    assert variants["is given it", "sm_80"]["failures"] == []
    assert variants["dynamic", "sm_80"]["failures"] == []
    assert variants["dynamic", "sm_80"]["shared_bytes"] == 99 << 10
    assert variants["dynamic", "sm_90"]["failures"] == [
        f"needs {228 << 10} bytes of shared memory, of {227 << 10}"
    ]


def test_names_are_listed_without_compiling():
    done = compiler(EXAMPLES, "--list", "--target=sm_90", "--match=__half")
    assert (done.returncode, done.stdout) == (0, "product<__half, 8>\nproduct<__half, 16>\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target=sm_80", "--match=absent"], "no variant with 'absent' in its name"),
        (["--target=gfx942"], "invalid choice: 'gfx942'"),
        (["--target=sm_80", "--jobs=0"], "--jobs has to be at least 1, not 0"),
        ([], "--target is needed"),
    ],
)
def test_invalid_arguments_of_the_compiler_are_refused(arguments, says):
    done = compiler(EXAMPLES, *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_two_variants_of_one_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "twice.py").write_text(
        "from precondattn_kernel_tools.cuda_compiler import Variant\n"
        "def variants(target):\n    return [Variant('same', '', 'k')] * 2\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = compiler("twice", "--target=sm_80")
    assert done.returncode == 2
    assert "twice has more than one variant of the name same" in done.stderr


def test_an_unknown_target_is_refused_by_name():
    with pytest.raises(ValueError, match=r"target has to be one of sm_80, .* not 'sm_1'"):
        compile_variant(Variant("k", "", "k"), "sm_1")


def test_a_missing_tool_is_named_with_its_extra(monkeypatch):
    cuda_toolkit.nvrtc_library.cache_clear()
    monkeypatch.setattr(cuda_toolkit, "_folders", lambda name: iter(()))
    with pytest.raises(MissingToolError, match=r"libnvrtc.so .* pip install 'precondattn.kernels"):
        cuda_toolkit.nvrtc_library()
    cuda_toolkit.nvrtc_library.cache_clear()
