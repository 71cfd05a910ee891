"""Compares all algorithms with the same tuning effort: `python -m experiments.leaderboard --help`.

entrants.py has the algorithms with the ranges of their hyper-parameters, and the federations. runner.py tunes and runs
one algorithm on one federation. report.py writes the page and the pictures. These modules only import public names of
fedjax_drift.
"""
