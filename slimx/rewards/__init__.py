"""Reward hooks that come with slimx."""
