"""Programs that the code reward runs in its sandboxes. Their source is copied there; nothing here imports them."""
