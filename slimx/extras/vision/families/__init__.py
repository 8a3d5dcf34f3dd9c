"""Families of vision-language models, entry points of `slimx.families`."""
