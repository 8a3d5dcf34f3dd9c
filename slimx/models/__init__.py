"""Models: translates a family's config.json and checkpoint to megatron-core and SGLang.

In: a Hugging Face or Megatron-LM directory.
Out: TransformerConfig's fields, and tables that relate each parameter of trainers and engines to checkpoint tensors.
Read first: `families/qwen3_moe.py`, then `rows.py`.
"""
