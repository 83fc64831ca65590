"""`precondattn new-backend`: generates a small package with a backend, as a start for a kernel.

    precondattn new-backend NAME --library torch --mechanism gated_delta

It installs with pip, computes one mechanism correctly by a plain algorithm, declines everything
else with reasons, and has a workflow that runs the conformance suite. Its templates are in
`templates/`.
"""

from precondattn_conformance.new_backend.package import LIBRARIES, MECHANISMS, new_backend

__all__ = ["LIBRARIES", "MECHANISMS", "new_backend"]
