"""Presets of `algorithm.name`: the keys in which a published algorithm differs from GRPO's defaults.

Every key can be set beside the name. Where a number comes from is said in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Any, Literal

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalize_std": False, "aggregation": "constant"},
    "dapo": {"clip_high": 0.28},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sample"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "topr": {"loss": "topr", "normalize_std": False},
    "sapo": {"loss": "sapo", "aggregation": "sample"},
    "clip_cov": {"loss": "clip_cov"},
    "kl_cov": {"loss": "kl_cov", "cov_share": 2e-3},
    "rloo": {"advantages": "rloo"},
    "opo": {"advantages": "opo"},
    "gpg": {"advantages": "gpg", "loss": "plain", "normalize_std": False},
    "reinforce_pp": {"advantages": "reinforce", "whiten": True},
    "reinforce_pp_baseline": {"advantages": "reinforce_baseline", "whiten": True},
    "remax": {"advantages": "remax"},
    "gdpo": {"advantages": "gdpo", "whiten": True},
    "gigpo": {"advantages": "gigpo", "gamma": 0.95},
    "decoupled_ppo": {"old_logprobs": "recompute", "correction": {"kind": "icepop", "low": 0.0, "high": 5.0}},
    "ppo": {"advantages": "gae", "whiten": True},
    "distillation": {"advantages": "none", "teacher_coef": 1.0},
    "dpo": {"advantages": "dpo", "loss": "plain", "aggregation": "sum", "reference": True},
    "bradley_terry": {"advantages": "none", "loss": "bradley_terry"},
    "sft": {"advantages": "none", "loss": "sft"},
}
"""Values of `algorithm` keys by name; what is not here keeps the section's default."""

Name = Literal[*PRESETS]
