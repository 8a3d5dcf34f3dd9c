"""Reward hooks that come with slimx: mathematics, choices, patterns, instructions, judges."""
