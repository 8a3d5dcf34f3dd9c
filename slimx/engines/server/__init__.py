"""Processes of one SGLang server or of the router: arguments, start and stop, keys and control calls."""
