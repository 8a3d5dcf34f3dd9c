"""Model classes for SGLang: `slimx.engines.server.launch` sets SGLANG_EXTERNAL_MODEL_PACKAGE to this package."""
