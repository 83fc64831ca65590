"""Mutation of a kernel: one token is changed at a time, and the suite has to detect it.

mutant.py           a mutant: its place, the text before and after, and its key
python_mutants.py   the mutants of a Python file: blocked algorithms, Triton, Pallas
cuda_mutants.py     the mutants of a CUDA file
target.py           the files named by `--mutate MODULE`
planting.py         puts a mutant into this process by replacing a function's code; writes no file
copied.py           puts a mutant of CUDA text into a copy of the package, which is imported
touched.py          the lines that a case executes
trial.py            runs the unchanged code, then each mutant, until a case fails
process.py          the process in which they run, with a time limit
run.py              runs all mutants of a target, the most sensitive cases first
record.py           the results so far, so that a run can be continued
equivalents.py      mutants that compute the same result, each with a reason
report.py           the table of results
command.py          `precondattn conformance --mutate`

`mutmut` and `cosmic-ray` change a file and start pytest for each mutant. That takes seconds for
each of thousands of mutants, and each process has to compute the oracle's results and compile the
kernels again. They do not read CUDA.
"""
