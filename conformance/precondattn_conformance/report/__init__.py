"""What is kept and shown of a run: the record, the matrix, JUnit, the page, comparisons.

Every report is made from results, which are plain data, so that a record from a file and a run that
has just ended look the same. Nothing is imported here: a record needs no Rich and no Jinja.
"""
