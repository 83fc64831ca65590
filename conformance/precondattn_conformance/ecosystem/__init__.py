"""The table *implementation × check*: public implementations, and our own backends.

    precondattn ecosystem --record ecosystem.json --page ecosystem.md
    precondattn ecosystem --peer 'fla/*' --level full

Each row runs in a separate process (`run.py`, `process.py`), and its outcomes become cells
(`cells.py`). The meaning of a red cell is judged by hand (`judgements.py`). A judgement of a cell
that is no longer red is an error.
"""
