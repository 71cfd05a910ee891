"""Data: `FederatedData` (federated.py), partitioners (partition.py), and data sets to load (datasets.py).

These modules only import `checks`, `errors` and each other.
"""
