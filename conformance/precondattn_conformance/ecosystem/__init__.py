"""The table *implementation × check*: public implementations, and our own backends.

    precondattn ecosystem --record ecosystem.json --page ecosystem.md
    precondattn ecosystem --peer 'fla/*' --level full

Each row runs in a process of its own (`run.py`, `process.py`), and its outcomes become cells
(`cells.py`). What a red cell means is judged by hand (`judgements/`), and a judgement of a cell
that is not red any more is an error.
"""
