"""The slimx plugin inside SGLang."""
