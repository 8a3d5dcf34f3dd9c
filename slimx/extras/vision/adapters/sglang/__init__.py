"""Vision-language models in SGLang."""
