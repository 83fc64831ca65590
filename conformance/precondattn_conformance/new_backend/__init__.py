"""`precondattn new-backend`: a small package that is a backend, to begin a kernel from.

    precondattn new-backend NAME --library torch

It installs with pip, solves LUCID's triangular system correctly, declines everything else with
reasons, and brings the workflow that holds it to the oracle. Its files are `templates/`.
"""

from precondattn_conformance.new_backend.package import LIBRARIES, new_backend

__all__ = ["LIBRARIES", "new_backend"]
