"""The server of chat completions through which agents sample."""
