"""One SGLang server or router: its arguments, process, keys and control calls."""
