"""Reward hooks that come with slimx: what a response is worth."""
