"""One round as a pure function: read `round.py` first, then `cohort.py` and `train.py`.

Nothing here keeps state or reads files. The modules import `devices`, `data`, `models`, `local` and what is below.
"""
