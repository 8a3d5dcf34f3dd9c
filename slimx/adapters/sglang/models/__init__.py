"""The package that SGLANG_EXTERNAL_MODEL_PACKAGE names in a server of slimx (`slimx.engines.server.launch`)."""
