"""The device of a trainer rank: choice of kernels, health and memory of the GPU, offloading to the host."""
