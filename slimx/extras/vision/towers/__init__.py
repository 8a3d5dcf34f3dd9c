"""Parameters of vision towers: weight-table rows for trainers and for engines."""
