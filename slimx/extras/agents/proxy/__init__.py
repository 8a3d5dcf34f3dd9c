"""The API server through which agents sample."""
