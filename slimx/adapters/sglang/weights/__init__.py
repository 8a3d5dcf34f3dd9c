"""Receipt of publications inside SGLang."""
