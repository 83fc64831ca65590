"""Functions that translate the names and layouts of other projects to those of this library."""
