"""What users hold: `Simulation`, the loop behind `Simulation.run`, and sweeps.

`simulation.py` comes first. The modules import `measures`, `storage`, `round` and what is below them.
"""
