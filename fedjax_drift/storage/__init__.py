"""Storage: client states outside the devices, checkpoints, and the identity of a run.

These modules may import `round` and the packages that it imports. They do not use a `Simulation` itself but its
description, `storage.specification.Specification`.
"""
