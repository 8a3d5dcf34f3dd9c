"""Programs that the code reward runs inside its sandboxes; their source is copied there, nothing imports them here."""
