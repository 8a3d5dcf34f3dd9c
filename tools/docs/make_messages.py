"""Writes tests/golden/COMMAND.txt, the answers of each command to wrong arguments, and tests/golden/mistakes.txt, the
answers to the mistakes of new users (tools.docs.mistakes), to be read as prose.

    python -m tools.docs.make_messages

A unit test compares the files with the commands, so run this after a change of a message, and read the difference.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from tools.docs import mistakes
from tools.docs.typed import typed_in

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
RUN = """\
run: {name: first, dir: run}
model: {path: model}
rollout: {prompts: prompts.jsonl, prompts_per_step: 2, group_size: 2}
reward: {function: math}
"""
FILES = {
    "run.yaml": RUN,
    "list.yaml": "- run\n- model\n",
    "torn.yaml": "run: {name: first\n",
    "typo.yaml": RUN + "schedule: {stpes: 3}\n",
    "foreign.yaml": RUN + "trainer: {lr: 1.0e-6, n_samples_per_prompt: 8}\n",
    "verl.yaml": RUN + "actor_rollout_ref: {rollout: {n: 8, tensor_model_parallel_size: 2}, actor: {strategy: fsdp}}\n",
    "broken_hook.py": "LIMITS = {}\nLIMIT = LIMITS['nope']\n",
    "model/config.json": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}\n',
    "empty/README": "No run was ever here.\n",
    "damaged/config.yaml": RUN + "schedule: {steps: 9}\n",
    "torn/config.yaml": "run: {name: first\n",
    "damaged/activity.json": '{"written": 17',
    "damaged/metrics.jsonl": '{"step": 1, "metr\n{"step": 2, "metrics": {}}\n',
    "generated/cursor/iter_0000003/slimx/manifest.json": "{}\n",
    "trained/checkpoints/latest_checkpointed_iteration.txt": "3",
    "page.html": "<html></html>\n",
}
"""Files of the directory in which the commands run, by path."""
CONFIGURATION = (
    "missing.yaml",
    "empty",
    "list.yaml",
    "torn.yaml",
    "run.yaml trainer.wrold_size=2",
    "typo.yaml",
    "foreign.yaml",
    "verl.yaml",
    "run.yaml trainer.world_size=two",
    "run.yaml trainer.world_size",
    "run.yaml model.path=nowhere",
    "run.yaml model.path=Qwen/Qwen3-0.6B",
    "run.yaml",
)
FOREIGN = (
    "run.yaml trainer.lr=1e-4",
    "run.yaml rollout.n=8",
    "run.yaml rollout.temperature=0.8",
    "run.yaml resume=false",
    "run.yaml learning_rate=1e-6",
    "run.yaml actor_rollout_ref.rollout.n=8",
    "run.yaml data.train_batch_size=64",
    "run.yaml trainer.total_epochs=3",
    "run.yaml --rollout-batch-size 32",
    "run.yaml --n-samples-per-prompt=8",
    "run.yaml --lr 1e-6",
    "run.yaml --global-batch-size 256",
    "run.yaml --rollout-num-gpus-per-engine 4",
    "run.yaml --use-wandb",
    "run.yaml --trainer.world-size 4",
)
"""Keys and flags of other frameworks, and of other sections."""
CASES: dict[str, Sequence[str]] = {
    "train": (*CONFIGURATION, *FOREIGN, "run.yaml run.dir=generated", "run.yaml schedule.max_staleness=-1"),
    "generate": (
        *CONFIGURATION,
        "run.yaml --checkpoint nowhere",
        "run.yaml --checkpoint empty",
        "run.yaml rollout.replay=empty",
        "run.yaml 'rollout.engines=[{name: far, urls: [\"http://10.0.0.1:3000\"]}]'",
        "run.yaml run.fork=nowhere",
    ),
    "eval": (*CONFIGURATION, "run.yaml --checkpoint nowhere"),
    "plan": CONFIGURATION,
    "doctor": (
        "--gap",
        "--hooks",
        "--hooks --effects run.yaml",
        "--say hello run.yaml",
        "--gap run.yaml rollout.replay=empty",
        "--gap --layers run.yaml trainer.tensor=2 trainer.world_size=2",
        "--hooks run.yaml rollout.generate=nowhere.at_all",
        "--hooks run.yaml rollout.generate=broken_hook.generate",
        "--effects missing.yaml",
    ),
    "health": ("--disk 0 --shm 0 --path nowhere", "--disk 0 --shm 0 --path empty --hca mlx5_77"),
    "status": ("nowhere", "empty", "torn", "damaged", "missing.yaml"),
    "rollouts": ("nowhere", "empty", "empty --step 3", "empty --dropped", "empty --buffer"),
    "report": ("nowhere", "empty", "damaged"),
    "convert": (
        "hf-to-megatron nowhere out",
        "hf-to-megatron empty out",
        "hf-to-megatron model out",
        "hf-to-megatron model page.html",
        "hf-to-megatron model out --layout tensor=x",
        "megatron-to-hf nowhere out --original model",
        "megatron-to-hf empty out --original model",
        "hf-to-fp8 nowhere out",
        "hf-to-fp8 empty out",
        "hf-to-int4 nowhere out",
        "hf-to-int4 model out",
        "adapters-to-peft nowhere out --original model",
        "adapters-to-peft empty out --original model",
    ),
}


def page(command: str) -> str:
    """Returns all cases of `command`: the command line, its output and its exit status."""
    return "\n".join(_case(command, arguments) for arguments in CASES[command])


def _case(command: str, arguments: str) -> str:
    status, output = typed_in(FILES, [command, *shlex.split(arguments)])
    return f"$ slimx {command} {arguments}\n{output}[{status}]\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    GOLDEN.mkdir(exist_ok=True)
    for command in CASES:
        (GOLDEN / f"{command}.txt").write_text(page(command))
    mistakes.PAGE.write_text(mistakes.page())


if __name__ == "__main__":
    main()
