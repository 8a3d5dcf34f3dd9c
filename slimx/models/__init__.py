"""Models: translates a family's config.json and checkpoint to megatron-core and SGLang.

In: a Hugging Face or Megatron-LM directory. Out: the fields of megatron-core's TransformerConfig, and two weight
tables, which relate each parameter of a trainer or an engine to tensors of the checkpoint. Read first:
`families/qwen3_moe.py`, then `rows.py`.
"""
