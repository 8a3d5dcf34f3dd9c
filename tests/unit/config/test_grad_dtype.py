"""Gradients in bf16 are refused where they would be fp32 all the same."""

from __future__ import annotations

from slimx.config.schema import Config
from tests.refusals import invalid


def test_gradients_of_an_fp32_model_are_fp32() -> None:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}
    values["trainer"] = {"grad_dtype": "bfloat16"}
    assert Config.model_validate({**values, "numerics": {"dtype": "bfloat16"}}).trainer.grad_dtype == "bfloat16"
    with invalid("gradients.dtype", about="trainer.grad_dtype"):
        Config.model_validate({**values, "numerics": {"dtype": "float32"}})
