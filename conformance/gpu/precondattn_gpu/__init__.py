"""Measurements on a GPU: two prepared runs, and stages that stop in time and resume.

    python -m precondattn_gpu --first --out FOLDER
    python -m precondattn_gpu --second --out FOLDER
    python -m precondattn_gpu --stage alive --out FOLDER

Time on a GPU may be short and in pieces. A run stops by its own clock and saves the result of each
task as soon as it is known; a stage resumes where it was. The most valuable tasks are first.

=============  =================================================================
`task`         a module that runs in a process, and its outcome
`results`      the results file of a stage, within limits of size
`driver`       runs the tasks of a stage within a time limit
`processes`    starts processes and stops them in time; `worker` runs several tasks in one
`first`        the parts of the first nine minutes; `second`, of the three after them
`ledger`       writes the backends' ledgers: kernels that agreed with the oracle
`dry_run`      simulates a run: a simulated clock, tasks that always pass
`warm`         compiles the kernels of the first runs without a GPU
`warm_calls`   the calls that launch them
`carried`      packs these kernels and the assembler for the GPU machine
`packing`      checks that the packed folder can be used there
`stages`       the list of stages; each has a module of its own name
=============  =================================================================
"""
