"""Data: a federation's rows, ways to cut a data set into clients, and data sets to load."""
