"""The preconditioners, one per file: its steps, and the reasons why it refuses some bases.

Their mathematics is in `spec/`, one file per leaf.
"""
