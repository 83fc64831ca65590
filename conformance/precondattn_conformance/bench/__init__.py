"""Benchmarks: the time of each mechanism, compared with what a user would run instead.

    precondattn bench

The files, in the order in which a run uses them:

=================  =====================================================================
cases              the measurements, by name: a mechanism, its sizes, and the work
selection          the requested ones
computation        one mechanism on one backend, ready to run forward, backward or decode
peers              the implementations to compare with, by mechanism
adapters           peers of other projects, as the suite checks them
naive_lucid        one of the peers: LUCID as in its paper
timed_suite        the cases as tests, timed by pytest-benchmark
columns            the columns, the group and the name of a row in pytest-benchmark
benchmark_cases    the rows of a user's own test, which has the mark in `mark`
checked_attention  the fixture that such a test times
measure            one case: checked, timed, compared with its peers
plan               a row before it is measured: description, backends
correct            whether a result is correct; a wrong one is not timed
paired             the ratio of two times that were measured in turns
cost               FLOPs and bytes, by mechanism and work
neighbours         other busy processes beside a run
machine            a description of the machine, and the rates of its GEMM and copy
record             a run as rows, and its JSON file
table, plot        a record as a table, and as figures
compare            two records: which ratios, peaks and results have become worse beyond noise
instructions       how many instructions calls take, beside the committed counts
command            `precondattn bench` and `precondattn compare`
=================  =====================================================================
"""
