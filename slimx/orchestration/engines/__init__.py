"""Engines of a run, which serve its trained policies or frozen models, and engines of commands without trainers."""
