"""Transfers weights from trainer ranks to engine ranks: copy plans, packing kernels, transports, publication protocol.

In: parameters of trainer ranks, and the layouts of trainers and engines.
Out: verified weights of one version in every engine, or the previous version.
Read first: `publish.py` for the protocol, `plan/copy_plan.py` for the bytes.
"""
