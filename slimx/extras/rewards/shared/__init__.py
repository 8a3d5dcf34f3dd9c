"""Parts shared by several reward hooks: boxed answers, notation of mathematics, verification, requests to servers."""
