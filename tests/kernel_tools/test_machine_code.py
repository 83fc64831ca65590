"""Reading machine code, from a recorded text and from kernels that are compiled here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from precondattn_kernel_tools.machine_code import read
from tests.kernel_tools.toolchain import needs_nvrtc

ROOT = Path(__file__).parents[2]

TEXT = """
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   EXIT ;
.text.second:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R19+0x800], desc[UR16][R22.64], !P0 ;
        /*0030*/              @!PT LDS RZ, [RZ] ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_2:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12], R24, gsb0 ;
        /*0060*/                   MUFU.EX2 R88, R88 ;
        /*0070*/                   F2F.BF16.F32 R2, R88 ;
        /*0080*/              @UP0 HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0090*/               @P1 BRA `(.L_x_2) ;
        /*00a0*/                   STL [R1], R2 ;
        /*00b0*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4);
"""


def test_the_counts_of_a_recorded_text():
    code = read("name", "sm_90", TEXT, "second")
    assert code.whole.instructions == 15
    assert code.whole.counts == {
        "tensor": {"HGMMA.64x128x16.F32.BF16": 1, "HMMA.16816.F32": 1},
        "load": {"128": 1},
        "store": {"16": 1},
        "async": {"LDGSTS.128": 1},
        "local": {"STL.32": 1},
        "special": {"EX2": 1},
        "convert": {"F2F.BF16.F32": 1},
        "barrier": {"BAR": 1},
    }
    assert code.whole.tensor_flops == 2 * 64 * 128 * 16 // 4 + 2 * 16 * 8 * 16


def test_loops_are_nested_and_the_trap_behind_the_end_is_none():
    outer, inner = read("name", "sm_90", TEXT, "second").loops
    assert (outer.first, outer.last, outer.depth) == (0x20, 0xB0, 1)
    assert (inner.first, inner.last, inner.depth) == (0x50, 0x90, 2)
    assert inner.instructions == 5
    assert inner.count("async") == 0
    assert outer.count("async") == 1


def test_a_function_that_is_not_in_the_text_is_named():
    with pytest.raises(ValueError, match="no function 'third'; it has first, second"):
        read("name", "sm_90", TEXT, "third")


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    """Switch off Triton's interpreter, which `conftest.py` switches on."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "precondattn_kernel_tools.machine_code", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )


def test_a_triton_kernel_is_compiled_and_read(tmp_path):
    path = tmp_path / "codes.json"
    done = command(
        "tests.kernel_tools.triton_examples.kernels",
        *("--target=sm_90", "--match=pipelined", f"--save={path}"),
    )
    assert done.returncode == 0, done.stderr
    assert "loop 0x" in done.stdout
    (code,) = json.loads(path.read_text())
    (loop,) = code["loops"]
    # A product of 64 × 64 × 64 per iteration, by one group of four warps.
    assert 4 * loop["tensor_flops"] == 2 * 64**3
    assert loop["counts"]["tensor"] == {"HGMMA.64x64x16.F32": 4}
    # Two tiles of 64 × 64 16-bit numbers, by 128 threads.
    assert loop["counts"]["async"] == {"LDGSTS.128": 8}
    assert "local" not in code["whole"]["counts"]


def test_kernels_that_would_be_interpreted_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = command("tests.kernel_tools.triton_examples.kernels", "--target=sm_90")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


def test_a_variant_that_does_not_compile_is_a_failure():
    done = command(
        "tests.kernel_tools.triton_examples.kernels", "--target=sm_90", "--match=product 8"
    )
    assert done.returncode == 1
    assert "sm_90  product 8" in done.stdout


@needs_nvrtc
def test_a_cuda_kernel_is_compiled_and_read(tmp_path):
    path = tmp_path / "codes.json"
    done = command(
        "tests.kernel_tools.cuda_examples.variants",
        *("--target=sm_90", "--match=product<float, 8>", f"--save={path}"),
    )
    assert done.returncode == 0, done.stderr
    (code,) = json.loads(path.read_text())
    assert code["whole"]["counts"]["load"].keys() <= {"32"}
    assert code["whole"]["counts"]["fp32"]["FFMA"] >= 8
