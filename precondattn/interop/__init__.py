"""Other projects' names and layouts, translated to those of this library."""
