"""Execution of a plan: pieces gathered from ranks into buckets."""
