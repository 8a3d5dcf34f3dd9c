"""Losses of the policy and of the value model."""
