"""A run in progress as users see it: its activity, its display on the terminal, the stacks of its processes, and the
lock of its directory."""
