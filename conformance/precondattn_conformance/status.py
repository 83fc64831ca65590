"""The possible outcomes of a case."""

PASSED, FAILED = "passed", "failed"
XFAILED = "xfailed"
"""The case failed, as expected."""
UNSUPPORTED = "unsupported"
"""The backend declined the case, with a reason."""
SKIPPED = "skipped"

STATUSES = (PASSED, FAILED, XFAILED, UNSUPPORTED, SKIPPED)
COMPARED = (PASSED, FAILED, XFAILED)
"""Statuses of cases whose result was compared with the oracle."""

OUTCOME = "precondattn_outcome"
"""The attribute of a pytest item and its report that contains the outcome of its case."""
