"""Exact mode (`numerics.mode: exact`): trainer and engines compute bitwise equal log-probs.

Both follow one contract (docs/numerics.md), which fixes the order of operations and every rounding. A row-parallel sum
is cut into a fixed number of leaves, equal parts of its inputs, whose partial sums are added in a binary tree.
Tensor-parallel ranks own complete leaves, so the sum does not depend on the number of ranks."""
