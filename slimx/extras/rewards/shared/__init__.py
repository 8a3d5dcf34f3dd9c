"""Parts that several reward hooks share: the context that they read, requests to servers, spellings of mathematics."""
