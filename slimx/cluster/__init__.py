"""Ray as slimx uses it: connections, calls with deadlines, waiting, restarts."""
