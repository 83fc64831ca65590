"""Measurements on a GPU, in stages that stop in time and resume.

    python -m precondattn_gpu --list
    python -m precondattn_gpu --stage alive --out FOLDER

Time on a GPU may be short and in pieces. A stage stops by its own clock, saves the result of each
task as soon as it is known, and resumes where it was. The most valuable stages are first.

=============  =================================================================
`task`         what runs in a process of its own, and what came of it
`results`      the file of a stage: what is done, within limits of size
`driver`       runs the tasks of a stage within a time limit
`processes`    starts processes, and stops them in time
`dry_run`      the same with a clock that jumps, and tasks that only pretend
`stages`       the list of stages; each has a module of its own name
=============  =================================================================
"""
