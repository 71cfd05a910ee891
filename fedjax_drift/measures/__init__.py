"""What is measured of a model and its clients: drift within a round, and the accuracy that each client gets.

The modules import `round` and what is below it.
"""
