"""The class `Simulation`, the loop behind `Simulation.run`, and sweeps.

Start with `simulation.py`. These modules may import `measures`, `storage`, `round`, and the packages that those import.
"""
