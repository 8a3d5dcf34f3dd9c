"""A running run as users see it: its activity, its display on the terminal, stacks of its processes, the lock of its
directory."""
