"""Sparse attention (DSA): DeepSeek-V3.2 and GLM-5."""
