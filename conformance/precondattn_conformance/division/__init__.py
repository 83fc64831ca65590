"""Sequences divided among processes, compared with the oracle: `precondattn conformance --devices`.

The checks are the layouts of `precondattn.parallel` (`cases.py`). Each process gets its tokens of a
call (`parts.py`), and computes their output and gradients together with the others (`worker.py`);
they are put together here, and compared as those of any other case (`run.py`). A process that dies
or hangs is one failure, and all are replaced (`processes.py`).
"""
