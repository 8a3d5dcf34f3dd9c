"""Models: a family's config.json and checkpoint, as megatron-core and SGLang have them.

In: a Hugging Face or Megatron-LM directory.
Out: the transformer configuration, and a table that relates every tensor of trainer and engine to the checkpoint's.
Read first: `families/qwen3_moe.py`, then `rows.py`.
"""
