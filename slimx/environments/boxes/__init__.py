"""Boxes: root directories of their own in which a rollout runs programs, from an image or a copy of a directory."""
