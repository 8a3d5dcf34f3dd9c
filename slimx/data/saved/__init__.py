"""Rollout files: encoding of groups, one file per step, and the values that training computed per token."""
