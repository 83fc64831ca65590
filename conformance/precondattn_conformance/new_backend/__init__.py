"""`precondattn new-backend`: a small package with a backend, as a start for a kernel.

    precondattn new-backend NAME --library torch

It installs with pip, solves LUCID's triangular system correctly, declines everything else with
reasons, and has a workflow that runs the conformance suite. Its files are in `templates/`.
"""

from precondattn_conformance.new_backend.package import LIBRARIES, new_backend

__all__ = ["LIBRARIES", "new_backend"]
