"""Reproduces tables of papers, and writes our numbers beside the published ones: `python -m experiments.tables --help`.

papers.py reads a table from its TOML file, runner.py runs the cells of the table, results.py stores their results, and
report.py writes a page about the table. queue.py says what is missing, times.py how long it takes, and crew.py runs it
in the processes of worker.py. These modules only import public names of fedjax_drift.
"""
