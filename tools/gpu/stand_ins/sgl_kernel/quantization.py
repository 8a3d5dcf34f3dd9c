"""Operations of GGUF's quantized weights, which SGLang imports with every model."""

from __future__ import annotations

from sgl_kernel.refused import refused

for _name in ("ggml_dequantize", "ggml_moe_a8", "ggml_mul_mat_a8", "ggml_mul_mat_vec_a8"):
    globals()[_name] = refused(_name)
