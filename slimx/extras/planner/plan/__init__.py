"""`slimx plan`: its report, the report as text, and the layouts that it suggests."""
