"""Losses that train the policy: objectives, KL terms, and corrections for off-policy tokens."""
