"""Plans of publications and exports: which bytes are copied from which rank to which, and in which dtype.

Terms. A *move* copies one rectangle of a trainer rank's parameter into a tensor of a *target*: an engine rank, or the
Hugging Face checkpoint. A *piece* is the kernels' record of a move. A *bucket* is the unit of transfer: the tensors
that are packed, sent and verified together. Its bytes are in a single allocation, or in one *part* per target. The
*publisher* is trainer rank 0.
"""
