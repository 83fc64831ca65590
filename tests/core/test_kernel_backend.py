"""Code that kernel backends share: the table of kernels, configurations, and limits."""

import json
import sys
from dataclasses import replace

import pytest

import precondattn as pa
from precondattn.kernel_backend.configurations import Configurations
from precondattn.kernel_backend.kernel_table import ByOption, kernels_in
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn_cupy.backend import KERNELS as OF_CUPY
from precondattn_pallas.backend import KERNELS as OF_PALLAS
from precondattn_triton.backend import KERNELS as OF_TRITON

TABLES = {"cupy": OF_CUPY, "triton": OF_TRITON, **OF_PALLAS}
NEEDED = {"triton": ["torch", "triton"], **{device: ["jax"] for device in OF_PALLAS}}


def test_a_table_is_searched_by_the_exact_classes_and_by_an_option():
    table = {
        pa.Softmax: ByOption("read", {LOG_MEAN_EXP: "fractions:Fraction"}),
        pa.UnitRows: ByOption("eps", {}, otherwise="decimal:Decimal"),
        (pa.LucidSolve, pa.Softmax): "colorsys:rgb_to_hsv",
    }
    group = pa.parse("lucid")
    assert kernels_in(table, pa.Softmax()) is None
    assert kernels_in(table, replace(pa.Softmax(), read=LOG_MEAN_EXP)).__name__ == "Fraction"
    assert kernels_in(table, pa.UnitRows()).__name__ == "Decimal"
    assert kernels_in(table, pa.Path()) is None
    sys.modules.pop("colorsys", None)
    assert kernels_in(table, pa.LucidSolve()) is None
    assert "colorsys" not in sys.modules
    assert kernels_in(table, group).__name__ == "rgb_to_hsv"


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_of_a_table_names_a_class(name):
    for framework in NEEDED.get(name, ()):
        pytest.importorskip(framework)
    for entry in TABLES[name].values():
        by_option = isinstance(entry, ByOption)
        for text in (*entry.classes.values(), entry.otherwise) if by_option else (entry,):
            assert not text or hasattr(kernels_in({pa.Softmax: text}, pa.Softmax()), "refuses")


def registry_of(path, text):
    path.write_text(text)
    return Configurations(path, lambda name: name, (16, 32, 64))


def test_forced_configurations_are_preferred_to_those_of_an_architecture(tmp_path):
    kernel = {"half": {"32": ["narrow"], "64": ["wide"]}, "full": {"32": ["full"]}}
    tables = {"every device": {"kernel": kernel}, "sm_90": {"kernel": {"half": {"64": ["chosen"]}}}}
    registry = registry_of(tmp_path / "configurations.json", json.dumps(tables))
    assert registry.find("kernel", 16, half=True) == "narrow"
    assert registry.find("kernel", 64, half=True) == "wide"
    with pytest.raises(KeyError):
        registry.find("kernel", 64, half=False)
    assert registry.find("kernel", 32, True, "sm_90") == "chosen"
    assert registry.find("kernel", 32, False, "sm_90") == "full"
    assert registry.find("kernel", 32, True, "sm_80") == "narrow"
    with registry.forced(kernel="forced"):
        assert registry.find("kernel", 64, False) == "forced"
    assert registry.find("kernel", 64, True) == "wide"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sm_90": {"read": {"hlf": {"32": [1]}}}}', "read has 'hlf' and the widths"),
        ('{"sm_90": {"read": {"half": {"48": [1]}}}}', r"read has 'half' and the widths \[48\]"),
        ('{"sm_90": {"read": {}, "read": {}}}', r"a name occurs twice among \['read', 'read'\]"),
        ('{"sm_90": {"read": {"full": {"16": [1, 2]}}}}', "takes 1 positional argument but 2"),
    ],
)
def test_a_wrong_file_of_configurations_is_refused(tmp_path, text, message):
    with pytest.raises((TypeError, ValueError), match=message):
        registry_of(tmp_path / "configurations.json", text)
