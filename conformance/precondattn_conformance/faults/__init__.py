"""Planted faults: backends that are wrong in one place, by which the suite itself is tested.

Errors in a formula, such as a dropped term, a wrong sign or a bound that is off by one, are not
planted here: a tool for mutation testing makes them by changing one token of the text.

fault.py            a fault: a change of the arguments, code, or result of a backend's method
carriers.py         the backends that carry faults; everything else in them is right
…                   the operators, one family per file: faults that apply to many mechanisms
written_by_hand/    faults of one mechanism, or of one algorithm, by idea
catalogue.py        all faults, and the smallest number for each mechanism
selftest.py         runs the suite on each fault: one that survives is an error in the suite

A fault is planted only while a method of its carrier runs. The oracle's results are computed
outside of it.
"""
