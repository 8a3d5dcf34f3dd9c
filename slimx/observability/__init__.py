"""The record of a run: metrics, trackers, the timeline of phases, the live table, the report.

Nothing is re-exported here, so that a process that only logs numbers does not load plotly or torch.
"""
