"""Python interfaces to the packing kernels in csrc/, for CPU and GPU, and the record format that both read."""
