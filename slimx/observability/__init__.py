"""Records and display of a run: metrics, tracking services, the timeline of phases, the live table, events.

In: metrics, samples and phases of each step, and events of the run.
Out: files in the run's directory, a table on the terminal, calls of trackers' sinks and of the event receiver.
Read first: `tracking/tracker.py`. Nothing is re-exported, so that a process that only logs numbers does not load torch.
"""
