"""Benchmarks: the time of each mechanism, compared with what a user would run instead.

    precondattn bench

`cases` names the measurements, and `selection` chooses among them. `command` runs `timed_suite`
under pytest-benchmark. There `measure` checks a case and its `peers` by `correct`, times them in
turns, and writes a row of a `record`. `benchmark_cases` has the rows of a user's own tests.
"""
