"""Reports of a run: the JSON record, the matrix, JUnit XML, the HTML page, comparisons.

Every report is generated from results, which are plain data, so a record from a file and a run that
has just ended look the same. Nothing is imported here, since a record requires neither Rich nor
Jinja.
"""
