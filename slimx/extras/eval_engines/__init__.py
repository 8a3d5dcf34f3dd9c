"""Engines that evaluate during training (`eval.engines`)."""
