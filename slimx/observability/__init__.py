"""Records of a run: metrics, trackers, the timeline of phases, the live table, events.

In: the metrics of a step, its groups, phases and events.
Out: files of the run directory, lines on the terminal, calls of sinks and receivers.
Read first: `tracking/tracker.py`. Nothing is re-exported: a process that only logs numbers does not load torch.
"""
