"""Requests for tokens: sampling, retries, streams, completions."""
