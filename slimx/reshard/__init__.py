"""Transfers weights from trainer ranks to engine ranks: copy plans, packing kernels, transports, publication protocol.

In: parameters of trainer ranks, and the layouts of trainers and engines.
Out: verified weights of one version in every engine, or the previous version.
Read first: `publish.py` for the protocol, `plan/copy_plan.py` for the bytes.

Terms. A *move* copies one rectangle of a trainer rank's parameter into a tensor of a *target*: an engine rank, or the
Hugging Face checkpoint. A *piece* is the kernels' record of a move. A *bucket* is the unit of transfer: the tensors
that are packed, sent and verified together. Its bytes are in one memory, or in one *part* per target. The *publisher*
is trainer rank 0."""
