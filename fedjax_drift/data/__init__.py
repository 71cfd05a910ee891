"""Data: the examples of a federation, partitioners, and data sets to load."""
