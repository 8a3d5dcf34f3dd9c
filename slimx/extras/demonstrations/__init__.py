"""Supervised fine-tuning on the answers of prompts."""
