"""Storage: client states outside the devices, checkpoints, and the identity of a run.

The modules import `round` and what is below it. They see a simulation only as a `storage.specification.Specification`.
"""
