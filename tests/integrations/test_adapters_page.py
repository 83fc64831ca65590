"""The code of `docs/adapters.md` runs, section by section, where its packages are installed."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
SECTIONS = dict(
    re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
PACKAGES = {
    "PEFT on a decoder": ("torch", "peft"),
    "PEFT on a model of Transformers": ("transformers", "peft"),
    "torchao": ("torch", "torchao"),
    "Flax": ("flax",),
    "Qwix": ("flax", "qwix"),
}


def test_every_section_has_its_packages():
    with_code = {name for name, text in SECTIONS.items() if "```python" in text}
    assert with_code == PACKAGES.keys()


@pytest.mark.thorough
# The tools call functions that Transformers and Flax have renamed.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("section", PACKAGES)
def test_a_section_runs(section, tmp_path, monkeypatch):
    for package in PACKAGES[section]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)
    exec(compile(code, f"{PAGE.name}: {section}", "exec"), {})
