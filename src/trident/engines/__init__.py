"""Devices, precision, the plain and the fused engine, and the GPU kernels."""
