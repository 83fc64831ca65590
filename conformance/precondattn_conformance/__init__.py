"""The conformance suite: any backend, also a stranger's, held against the oracle.

    precondattn conformance --level smoke
    pytest --pyargs precondattn_conformance --precondattn-backend NAME

Both run the same cases (`case.py`), which come from the mechanisms' own declarations.
"""
