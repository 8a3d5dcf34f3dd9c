"""Engines of a run: those of its policies, frozen ones, and those that serve without trainers."""
