"""Sequences divided among devices, compared with the oracle: `precondattn conformance --devices`.

The checks are the layouts of `precondattn.parallel` (`cases.py`). Each device gets its tokens of a
call (`parts.py`), and computes their output and gradients together with the others, as a process of
PyTorch (`torch_worker.py`) or as one of the devices of a process of JAX (`jax_worker.py`). They are
put together here, and compared as those of any other case (`run.py`). A process that dies or hangs
is one failure, and all are replaced (`processes.py`).
"""
