"""Weight transfer from trainer ranks to engine ranks: plan, packing kernels, transports, publication.

In: parameters of trainer ranks, and the layouts of both sides.
Out: verified weights of one version in every engine, or the previous version.
Read first: `publish.py` for the protocol, `plan/copy_plan.py` for the bytes.
"""
