"""Changes to SGLang for vision-language models."""
