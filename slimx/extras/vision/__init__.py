"""Vision-language models: their language model in the trainer, and their vision tower."""
