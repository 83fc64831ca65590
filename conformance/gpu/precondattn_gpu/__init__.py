"""Two prepared runs on a GPU, which stop in time: which kernels run, which are right, how fast.

    python -m precondattn_gpu --first --out FOLDER
    python -m precondattn_gpu --second --out FOLDER

A run stops by its own clock and saves the result of each task as soon as it is known. The most
valuable tasks are first; `ledger` then writes which kernels agreed with the definition.
"""
