"""Losses of the policy."""
