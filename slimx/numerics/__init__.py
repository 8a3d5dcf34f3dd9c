"""Plain functions of tensors that define the model's arithmetic; no Megatron, no SGLang, any device."""
