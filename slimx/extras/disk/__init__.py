"""Publications as files, whole versions or changes to them: `publish.transport: disk`."""
