"""Processors of images for SGLang: `slimx.engines.server.launch` sets SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE to this
package."""
