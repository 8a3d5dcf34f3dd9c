"""Needs of reward hooks, and several of them as one."""
