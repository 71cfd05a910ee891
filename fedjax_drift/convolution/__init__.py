"""The convolution, pooling and group normalisation of images. The convolution has a form for each kind of device.

`conv.py` has the function and selects the implementation: `cpu.py`, `tpu.py`, or the one of `windows.py`, which is used
on GPUs. On a CPU, 3x3 convolutions are those of `winograd.py`, and `bilinear.py` has their derivatives. Inside a
network, images have the layout [C, H, W, B].
"""
