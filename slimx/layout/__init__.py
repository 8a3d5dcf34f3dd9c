"""The algebra of weight layouts: which elements of which tensor each rank has.

In: a family's table of rows, and parallel sizes of trainers or engines.
Out: index maps between the tensors of a checkpoint, of trainer ranks and of engine ranks.
Read first: `table.py`, then `maps.py`.
"""
