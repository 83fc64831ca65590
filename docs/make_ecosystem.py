"""Write `ecosystem.md` and `ecosystem/reports` from the saved table in `measurements/`.

    precondattn ecosystem --record docs/measurements/ecosystem/smoke.json
    python docs/make_ecosystem.py             # the page and the reports
    python docs/make_ecosystem.py --snippets  # runs the code of judgements again before

The judgements of red cells are in `precondattn_conformance/ecosystem/judgements/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from precondattn_conformance.ecosystem import page as pages
from precondattn_conformance.ecosystem import reports
from precondattn_conformance.ecosystem.judgement import require_true
from precondattn_conformance.ecosystem.judgements import JUDGEMENTS
from precondattn_conformance.ecosystem.snippets import run_snippets
from precondattn_conformance.ecosystem.table import Table, load

PAGE = Path(__file__).with_name("ecosystem.md")
RECORD = Path(__file__).with_name("measurements") / "ecosystem" / "smoke.json"
REPORTS = Path(__file__).with_name("ecosystem") / "reports"


def files(table: Table) -> dict[Path, str]:
    """The text of every generated file. Raises a StaleError if a judgement does not fit."""
    require_true(table, JUDGEMENTS)
    texts = {REPORTS / name: text for name, text in reports.reports(table, JUDGEMENTS).items()}
    return {PAGE: pages.page(table, JUDGEMENTS), **texts}


def main() -> None:
    table = load(RECORD)
    if "--snippets" in sys.argv:
        run_snippets(table, JUDGEMENTS)
        table.save(RECORD)
    written = files(table)
    for old in set(REPORTS.glob("*.md")) - set(written):
        old.unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
