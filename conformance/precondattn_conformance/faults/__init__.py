"""Planted faults: the suite is tested by backends that are wrong in one place.

fault.py            what a fault is: a change of what a backend's method is given, does, or gives
carriers.py         the backends that carry them, right in everything else
…                   the operators, a family a file: what can go wrong everywhere
written_by_hand/    faults of one piece of mathematics, or of one algorithm
catalogue.py        all of them, and how many there have to be of each mechanism
selftest.py         runs the suite on each: a fault that survives is a fault of the suite

A fault is planted in this process, while a method of its carrier runs, and in nothing else: the
oracle that the suite compares with is computed outside.
"""
