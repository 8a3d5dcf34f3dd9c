"""Publication of weights as files (`publish.transport: disk`), either whole versions or the changes between them."""
