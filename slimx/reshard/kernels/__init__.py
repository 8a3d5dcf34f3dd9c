"""Python interfaces of the packing kernels of csrc/, for CPU and GPU, and the record format that both read."""
