"""Benchmarks: how long each mechanism takes, beside what a user would run instead.

    precondattn bench

One idea to a file, in the order in which a run meets them:

==============  =====================================================================
cases           what is measured, by name: a mechanism, its sizes, and the work
computation     one mechanism on one backend, ready to run forward, backward or decode
peers           what it is measured against, by mechanism
naive_lucid     one of the peers: LUCID as its paper writes it
timed_suite     the cases as tests, which pytest-benchmark times
measure         one case: checked, timed, compared with its peers
correct         whether an output is right; a wrong one gets no time
paired          the ratio of two times that were taken in turns
cost            FLOPs and bytes, by mechanism and work
machine         the machine: what it is, and what its own GEMM and copy reach
record          a run as rows, and the JSON file of it
table, plot     a record to look at
compare         two records: what has become slower beyond noise
command         `precondattn bench` and `precondattn compare`
==============  =====================================================================
"""
