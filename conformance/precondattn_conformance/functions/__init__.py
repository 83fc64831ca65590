"""Anyone's function under test: a bare function of arrays, without a package or a class."""
