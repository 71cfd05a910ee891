"""Data: `FederatedData` (federated.py), partitioners (partition.py), and data sets to load (datasets.py).

The modules import `checks`, `errors` and each other.
"""
