"""Exact mode inside SGLang."""
