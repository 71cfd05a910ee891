"""Devices and processes: the mesh over which clients are spread, and how arrays and programs get there.

The modules import `data.files`, for the folder of the compilation cache, and what is below it.
"""
