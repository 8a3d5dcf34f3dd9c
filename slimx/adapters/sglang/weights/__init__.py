"""Receives published weights inside SGLang's processes: locates, verifies and copies each tensor into the loaded
model."""
