"""Functions under test: plain functions of arrays, without a package or a class."""
