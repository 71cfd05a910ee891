"""Devices and processes: the mesh of devices, its memory, the start of programs, and communication between processes.

Read `mesh.py` first. The modules import `checks`, `errors`, `types`, each other, and `data.files` (for the folder of
the compilation cache).
"""
