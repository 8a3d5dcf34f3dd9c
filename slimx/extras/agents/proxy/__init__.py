"""The server with OpenAI's and Anthropic's APIs through which agents sample."""
