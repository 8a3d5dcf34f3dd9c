"""Reward hooks for tasks about images: boxes, points and counts."""
