"""One round as a pure function. Read `round.py` first, then `cohort.py` and `train.py`.

The modules keep no state and read no files. They import `devices`, `data`, `models`, `local`, and the modules that
these import.
"""
