"""Reproduces tables of papers, and writes our numbers beside the published ones: `python -m experiments.tables --help`.

papers.py reads a table from its TOML file, runner.py runs the cells of the table, results.py stores their results, and
report.py writes a page about the table. These modules only import public names of fedjax_drift.
"""
