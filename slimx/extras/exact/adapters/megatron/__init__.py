"""Installs exact mode in megatron-core's models."""
