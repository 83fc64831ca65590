"""The mark of a test that `benchmark_cases` decorates. The plugin reads it without NumPy."""

BENCHMARKED = "precondattn_benchmark"
