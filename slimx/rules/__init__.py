"""Rules that check a run before it starts, one file per topic.

In: sections of a configuration and, if available, the model, a machine, weights and a tokenizer.
Out: a refusal per fault, with a code and the key to change. Each file is an entry point of `slimx.rules`.
Read first: `flow.py`; `unproven.py` for combinations. Rules import slow modules inside their functions.
"""
