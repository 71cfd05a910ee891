"""Runs tables of papers again, and writes our numbers beside the printed ones: `python -m experiments.tables --help`.

papers.py reads a table from its TOML file, runner.py runs its cells and keeps their results, report.py writes its page.
Only public names of fedjax_drift are imported here.
"""
