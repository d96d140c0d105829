"""Where and how numbers are computed: devices, precision, the fused engine and its GPU kernels."""
