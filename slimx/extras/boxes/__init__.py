"""Boxes that run programs of a model apart from everything else: sandboxes, containers, terminals, remote boxes."""
