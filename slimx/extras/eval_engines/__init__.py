"""Engines that evaluate beside training (`eval.engines`)."""
