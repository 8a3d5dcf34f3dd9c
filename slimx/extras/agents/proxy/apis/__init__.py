"""The APIs for agents: each parses its requests, and writes its responses and errors."""
