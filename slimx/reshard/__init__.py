"""From trainer weights to engine weights: plan, kernels, publication."""
