"""Features that a GRPO run does without, a folder and a README.md for each; found by name, as entry points."""
