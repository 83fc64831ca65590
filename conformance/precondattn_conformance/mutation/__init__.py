"""Mutation of a kernel: one token is changed at a time, and the suite has to see it.

mutant.py           a mutant: where, what was there, what stands there now, and its key
python_mutants.py   the mutants of a Python file: blocked algorithms, Triton, Pallas
cuda_mutants.py     the mutants of a CUDA file
target.py           from `--mutate MODULE` to a file
planting.py         a mutant in this process: the code of a function is replaced, no file is written
copied.py           a mutant of CUDA text: the process imports a copy of the package
touched.py          which lines a case executes
trial.py            the unchanged code, then each mutant, until a case fails
process.py          the process in which they run, with a limit of time
run.py              all mutants of a target, the most sensitive cases first
record.py           what is known so far, so that a run can be continued
equivalents.py      mutants that compute the same, each with a reason
report.py           the table
command.py          `precondattn conformance --mutate`

`mutmut` and `cosmic-ray` change a file and start pytest for each mutant: seconds for each of
thousands, and the process has neither the oracle's results nor the kernels. They do not read CUDA.
"""
