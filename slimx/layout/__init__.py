"""Weight layouts: which elements of which checkpoint tensor each trainer and engine rank has.

In: a model family's table of rows, and the parallel sizes of trainers or engines.
Out: index maps between the tensors of a checkpoint, of trainer ranks and of engine ranks.
Read first: `table.py`, then `maps.py`.
"""
