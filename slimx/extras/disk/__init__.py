"""Publications as files, either whole versions or changes to them: `publish.transport: disk`."""
