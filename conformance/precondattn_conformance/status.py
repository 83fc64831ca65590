"""What can come of a case."""

PASSED, FAILED = "passed", "failed"
XFAILED = "xfailed"
"""It failed, as was expected."""
UNSUPPORTED = "unsupported"
"""The backend declined it, and said why."""
SKIPPED = "skipped"

STATUSES = (PASSED, FAILED, XFAILED, UNSUPPORTED, SKIPPED)
COMPARED = (PASSED, FAILED, XFAILED)
"""The backend gave an answer, and that was held to the oracle."""
