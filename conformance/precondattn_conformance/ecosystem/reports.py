"""Reports of defects of ten lines each, which can be sent to a project."""

from __future__ import annotations

from collections.abc import Sequence

from precondattn_conformance.ecosystem.judgement import Judgement
from precondattn_conformance.ecosystem.page import code_of, report_numbers, wrapped
from precondattn_conformance.ecosystem.table import Table


def reports(table: Table, judgements: Sequence[Judgement]) -> dict[str, str]:
    """The reports by file name."""
    of_rows = [each for each in judgements if each.rows(table)]
    return {f"{n}.md": _report(table, each) for each, n in report_numbers(of_rows).items()}


def _report(table: Table, judgement: Judgement) -> str:
    rows = judgement.rows(table)
    versions = ", ".join(
        dict.fromkeys(" of ".join(filter(None, (r.version, r.date))) for r in rows)
    )
    names = ", ".join(f"`{row.name.partition('/')[2]}`" for row in rows)
    return f"""\
---
orphan: true
---

# Report: {judgement.title}

For [{rows[0].project}]({rows[0].url}), {names}; seen with {versions}.

{wrapped(f"**What happens.** {judgement.sentence}")}

{code_of(judgement, table)}
{wrapped(f"**Expected.** {judgement.expected}")}
"""
