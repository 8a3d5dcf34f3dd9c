"""Installs exact mode in megatron-core's models and SGLang's servers."""
