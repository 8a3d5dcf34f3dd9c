"""`slimx plan`: the report, its text, and layouts that it suggests."""
