"""Evaluation engines, which evaluate during training (`eval.engines`)."""
