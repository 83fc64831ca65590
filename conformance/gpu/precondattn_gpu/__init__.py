"""Measurements on a GPU: two prepared runs, and stages that stop in time and resume.

    python -m precondattn_gpu --first --out FOLDER
    python -m precondattn_gpu --second --out FOLDER
    python -m precondattn_gpu --stage alive --out FOLDER

Time on a GPU may be short and in pieces. A run stops by its own clock and saves the result of each
task as soon as it is known; a stage resumes where it was. The most valuable tasks are first.

=============  =================================================================
`task`         what runs in a process, and what came of it
`results`      the file of a stage: what is done, within limits of size
`driver`       runs the tasks of a stage within a time limit
`processes`    starts processes, and stops them in time; `worker` runs several tasks in one
`first`        the parts of the first nine minutes; `second`, of the three after them
`ledger`       what has run and agreed, for the backends
`dry_run`      the same with a clock that jumps, and tasks that only pretend
`warm`         the kernels of the first runs, compiled without a GPU
`warm_calls`   the calls that launch them
`carried`      these and the assembler, in the folder that is carried to the GPU machine
`packing`      whether that folder can be used there
`stages`       the list of stages; each has a module of its own name
=============  =================================================================
"""
