"""What the array-API standard lacks, by each library's own function."""
