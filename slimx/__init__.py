"""slimx: reinforcement-learning training for large mixture-of-experts language models."""

__version__ = "0.1.0"
