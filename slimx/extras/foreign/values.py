"""Values of keys as users and other frameworks write them, in lower case, with the value in slimx or the reason why
there is none."""

from __future__ import annotations

from collections.abc import Mapping

from slimx.extras.foreign.meaning import ALGORITHMS, KL_KINDS, Meaning, unsupported

_HALF = unsupported("trainers compute in bfloat16 or float32")
_DTYPES: Mapping[str, str | Meaning] = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float", "single", "torch.float32", "full"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), _HALF),
    "fp8": unsupported("trainer.fp8 is for fp8 matrix products, publish.quantize for fp8 engines"),
}
_OTHER_GPU = unsupported("plans support h100, h200 and gb300; for another GPU set cluster.gpu_memory_gib")
VALUES: Mapping[str, Mapping[str, str | Meaning]] = {
    "cluster.device": dict.fromkeys(("gpu", "nvidia", "cuda:0", "h100", "h200", "gb300"), "cuda")
    | {
        "tpu": unsupported("slimx supports cuda and, for trials, cpu"),
        "rocm": unsupported("slimx supports only CUDA GPUs"),
    },
    "cluster.gpu": dict.fromkeys(("a100", "a800", "h20", "h800", "b200", "b300", "l40s", "v100", "gh200"), _OTHER_GPU)
    | dict.fromkeys(("h100-80gb", "h100_80gb", "h100-sxm"), "h100"),
    "numerics.dtype": _DTYPES,
    "trainer.optimizer.moments_dtype": _DTYPES,
    "trainer.optimizer.kind": {"adamw": "adam", "dist_muon": "muon"},
    "trainer.optimizer.decay": {"none": "constant", "cos": "cosine", "lin": "linear"},
    "trainer.attention": {
        "flash_attention_2": "flash",
        "fa2": "flash",
        "fa3": "flash",
        "eager": "unfused",
        "sdpa": "auto",
    },
    "trainer.moe.dispatcher": {"deepep": "flex", "deep_ep": "flex", "hybridep": "flex"},
    "trainer.fp8": {
        "e4m3": "blockwise",
        "hybrid": unsupported("trainer.fp8 must be blockwise or mxfp8"),
        "true": "blockwise",
    },
    "trainer.recompute.granularity": {"true": "full", "false": "none"},
    "publish.transport": {"ipc": "cuda_ipc", "cuda": "cuda_ipc", "rdma": "nixl", "file": "disk", "shm": "memory"},
    "publish.quantize": {"fp8": unsupported("set one of the fp8 rules ieee, triton, te and ue8m0 (docs/numerics.md)")},
    "algorithm.name": ALGORITHMS
    | {"reinforce": "reinforce_pp", "policy_gradient": "reinforce_pp", "opd": "distillation"}
    | dict.fromkeys(("rm", "reward_model"), "bradley_terry"),
    "algorithm.aggregation": {
        **dict.fromkeys(("token-mean", "token_mean"), "token"),
        **dict.fromkeys(("seq-mean-token-mean", "sequence", "seq"), "sample"),
    },
    "algorithm.kl_estimator": KL_KINDS,
    "algorithm.kl_reward_estimator": KL_KINDS,
    "algorithm.correction.kind": dict.fromkeys(("tis", "truncated", "true"), "truncate"),
    "run.resume": {"true": "must", "false": "never", "disable": "never"},
    "numerics.mode": {"bitwise": "exact", "deterministic": "exact"},
}
