"""Values of keys as users and other frameworks write them, in lower case, with the value in slimx or the reason why
there is none."""

from __future__ import annotations

from collections.abc import Mapping

from slimx.extras.foreign.meaning import ALGORITHMS, KL_KINDS, Table, table, unsupported

_HALF = unsupported("trainers compute in bfloat16 or float32")
_DTYPES: Table = {
    "bf16 torch.bfloat16": "bfloat16",
    "fp32 float single torch.float32 full": "float32",
    "fp16 float16 half torch.float16": _HALF,
    "fp8": unsupported("trainer.fp8 is for fp8 matrix products, publish.quantize for fp8 engines"),
}
_OTHER_GPU = unsupported("plans support h100, h200 and gb300; for another GPU set cluster.gpu_memory_gib")
_VALUES: Mapping[str, Table] = {
    "cluster.device": {
        "gpu nvidia cuda:0 h100 h200 gb300": "cuda",
        "tpu": unsupported("slimx supports cuda and, for trials, cpu"),
        "rocm": unsupported("slimx supports only CUDA GPUs"),
    },
    "cluster.gpu": {
        "a100 a800 h20 h800 b200 b300 l40s v100 gh200": _OTHER_GPU,
        "h100-80gb h100_80gb h100-sxm": "h100",
    },
    "numerics.dtype": _DTYPES,
    "trainer.optimizer.moments_dtype": _DTYPES,
    "trainer.optimizer.kind": {"adamw": "adam", "dist_muon": "muon"},
    "trainer.optimizer.decay": {"none": "constant", "cos": "cosine", "lin": "linear"},
    "trainer.attention": {
        "flash_attention_2 fa2 fa3": "flash",
        "eager": "unfused",
        "sdpa": "auto",
    },
    "trainer.moe.dispatcher": {"deepep deep_ep hybridep": "flex"},
    "trainer.fp8": {
        "e4m3 true": "blockwise",
        "hybrid": unsupported("trainer.fp8 must be blockwise or mxfp8"),
    },
    "trainer.recompute.granularity": {"true": "full", "false": "none"},
    "publish.transport": {"ipc cuda": "cuda_ipc", "rdma": "nixl", "file": "disk", "shm": "memory"},
    "publish.quantize": {"fp8": unsupported("set one of the fp8 rules ieee, triton, te and ue8m0 (docs/numerics.md)")},
    "algorithm.name": ALGORITHMS
    | {"reinforce policy_gradient": "reinforce_pp", "opd": "distillation", "rm reward_model": "bradley_terry"},
    "algorithm.aggregation": {
        "token-mean token_mean": "token",
        "seq-mean-token-mean sequence seq": "sample",
    },
    "algorithm.kl_estimator": KL_KINDS,
    "algorithm.kl_reward_estimator": KL_KINDS,
    "algorithm.correction.kind": {"tis truncated true": "truncate"},
    "run.resume": {"true": "must", "false disable": "never"},
    "numerics.mode": {"bitwise deterministic": "exact"},
}
VALUES = {key: table(values) for key, values in _VALUES.items()}
