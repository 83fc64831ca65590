"""The possible outcomes of a case."""

PASSED, FAILED = "passed", "failed"
XFAILED = "xfailed"
"""It failed, as expected."""
UNSUPPORTED = "unsupported"
"""The backend declined it, with a reason."""
SKIPPED = "skipped"

STATUSES = (PASSED, FAILED, XFAILED, UNSUPPORTED, SKIPPED)
COMPARED = (PASSED, FAILED, XFAILED)
"""The backend gave a result, and that was compared with the oracle."""

OUTCOME = "precondattn_outcome"
"""The attribute of a pytest item, and of its report, that holds the outcome of its case."""
