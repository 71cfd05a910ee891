"""Devices and processes: the mesh of devices, what they hold and run, and how processes work together.

Read `mesh.py` first. The modules import only `data.files` (for the folder of the compilation cache) and what is below.
"""
