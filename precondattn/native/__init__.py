"""Functions that the array-API standard lacks, implemented by each library's own function."""
