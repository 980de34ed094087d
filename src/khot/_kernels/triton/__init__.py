"""Triton kernels, for CUDA and ROCm: one read of the row, one write. The README beside this file says how a
call becomes a launch, and which file has what."""
