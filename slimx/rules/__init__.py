"""Rules that a run is checked by before it starts: one file for a topic, whatever its rules need to know.

In: sections of a configuration, and as far as they are known the model, a machine, weights and a tokenizer.
Out: a refusal of each fault, with a code and the key to change. Each file is an entry point of `slimx.rules`.
Read first: `flow.py`; `unproven.py` for combinations. Slow imports are in the rule that needs them.
"""
