"""Sequences divided among devices, compared with the oracle: `precondattn conformance --devices`.

The checks are the layouts of `precondattn.parallel` (`cases.py`). Each device gets its part of a
call's tokens (`parts.py`), and computes their output and gradients together with the others. In
PyTorch a device is a process (`torch_worker.py`); in JAX one process has all devices
(`jax_worker.py`). The results are joined and compared as for any other case (`run.py`). A process
that dies or hangs is one failure, and all processes are replaced (`processes.py`).
"""
