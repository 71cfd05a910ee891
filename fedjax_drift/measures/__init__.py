"""Measures: the drift of the clients within a round, and the loss and accuracy of the model for each client.

The modules import `round` and modules that `round` imports.
"""
