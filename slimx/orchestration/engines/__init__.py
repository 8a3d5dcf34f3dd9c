"""Engines of a run: those that serve trained policies, frozen ones, and those of commands without trainers."""
