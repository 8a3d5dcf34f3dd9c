"""One GRPO step of TRL on the quickstart's model and prompts: `python benchmarks/start_trl.py MODEL PROMPTS OUT`.

Prints a line when the step is done. TRL generates with transformers and trains in the same process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow
from transformers import TrainerCallback

PROMPTS, GROUP, NEW_TOKENS = 32, 8, 4
"""The values of configs/moe/quickstart.yaml."""


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """Returns 1.0 for completions that equal the answer, else 0.0."""
    return [float(one[0]["content"].strip() == expected) for one, expected in zip(completions, answer, strict=True)]


class StepPrinter(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        print("step 1", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out")
    options = parser.parse_args()
    if absent := [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]:
        parser.error(f"{' and '.join(absent)} cannot be imported: install TRL as the head of start.py says")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    records = [json.loads(line) for line in options.prompts.read_text().splitlines()[: 4 * PROMPTS]]
    rows = [{"prompt": one["messages"], "answer": one["answer"]} for one in records]
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=right,
        args=GRPOConfig(
            output_dir=options.out,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            max_steps=1,
            learning_rate=2e-4,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="prompts"),
        callbacks=[StepPrinter()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
