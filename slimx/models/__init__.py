"""Model families: one file each, from the Hugging Face config to Megatron's, with the weight table."""
