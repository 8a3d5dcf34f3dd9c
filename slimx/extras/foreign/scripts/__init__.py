"""Launch scripts of other frameworks, turned into configurations."""
