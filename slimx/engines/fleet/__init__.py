"""Engines of a run: their Ray actors, who takes part, and what is started again."""
