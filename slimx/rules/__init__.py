"""Rules that check a run before it starts, one file per topic.

In: sections of a configuration and, if available, the model, a machine, weights and a tokenizer.
Out: an error for each fault, with a code and the key to change.
Read first: `flow.py`; `unproven.py` for combinations of features. Rules import slow modules inside their functions.
"""
