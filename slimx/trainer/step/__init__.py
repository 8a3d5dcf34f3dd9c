"""Forward, backward and optimizer step."""
