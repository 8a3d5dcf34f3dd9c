"""What several reward hooks need: the context that they read, requests to servers, spellings of mathematics."""
