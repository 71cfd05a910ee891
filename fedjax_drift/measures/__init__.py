"""Measures: the drift of the clients within a round, and the loss and accuracy of the model for each client.

The modules import `round` and modules that `round` imports. `personal.py` also imports the fine-tuning of
`algorithms/running_statistics.py`.
"""
