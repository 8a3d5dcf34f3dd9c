"""What a run tells about itself: metrics, trackers, the timeline of phases, the live table, the report.

Import from the modules: `metrics`, `tracker`, `timeline`, `live`, `report`. Nothing is re-exported, so that a process
that only logs numbers does not load plotly or torch.
"""
