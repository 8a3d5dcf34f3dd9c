"""The package of SGLANG_EXTERNAL_MODEL_PACKAGE in a server of slimx (`slimx.engines.server.launch`)."""
