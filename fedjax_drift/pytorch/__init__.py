"""PyTorch networks as pure JAX functions, for `Model.from_torch`.

`torch.export` turns a module into a list of operations without side effects (`graph.py`). `run.py` carries it out with
the JAX functions of `operations`, and `network.py` builds the fields of a `Model` from it. PyTorch
itself is only needed to create the model. It takes no part in a round.
"""
