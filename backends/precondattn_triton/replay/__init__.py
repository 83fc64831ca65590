"""Calls of a method of kernels that repeat what an earlier call with such arguments launched.

The second call with the same signature is recorded (`recorder.py`): which kernels it launches, with
which numbers, on which of its inputs, workspaces and results, and which of PyTorch's operators run
between them. Later calls (`method.py`) run none of the Python that led there: they allocate the
results and one workspace (`workspace.py`), and launch (`program.py`).

What may be recorded depends on the signature alone (`signature.py`), not on the entries of arrays.
A call that reads an entry on the host, or uses an array that is not its argument, is never
repeated; it runs as before.
"""
