"""Write `ecosystem.md` from the saved table in `measurements/`.

    precondattn ecosystem --record docs/measurements/ecosystem/smoke.json
    python docs/make_ecosystem.py

The judgements of red cells are in `precondattn_conformance/ecosystem/judgements.py`.
"""

from pathlib import Path

from precondattn_conformance.ecosystem.judgement import require_true
from precondattn_conformance.ecosystem.judgements import JUDGEMENTS
from precondattn_conformance.ecosystem.page import page
from precondattn_conformance.ecosystem.table import load

PAGE = Path(__file__).with_name("ecosystem.md")
RECORD = Path(__file__).with_name("measurements") / "ecosystem" / "smoke.json"


def text() -> str:
    """The page. Raises a StaleError if a judgement does not fit."""
    table = load(RECORD)
    require_true(table, JUDGEMENTS)
    return page(table, JUDGEMENTS)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
