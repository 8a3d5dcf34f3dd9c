"""What a rollout acts in besides the model: tools and the sandbox that runs untrusted code."""
