"""Mistakes that new users make, and tests/golden/mistakes.txt, which shows the answers of slimx.

Each mistake is a command in the directory of a small valid run, with one file changed. Nothing trains: a mistake that
is not refused before a run starts is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet

from slimx.extras.quickstart.make_model import make_model
from slimx.orchestration import session
from tools.docs import typed_names
from tools.docs.typed import typed_in

PAGE = Path(__file__).parents[2] / "tests" / "golden" / "mistakes.txt"
RUN = """\
run: {name: sums, dir: runs/sums}
model: {path: model}
numerics: {dtype: float32}
cluster: {device: cpu}
rollout:
  prompts: prompts.jsonl
  prompts_per_step: 2
  group_size: 2
  max_prompt_tokens: 64
  engines: [{name: actor, max_total_tokens: 32768}]
  sampling: {max_new_tokens: 4}
schedule: {steps: 2}
"""
PROMPTS = """\
{"messages": [{"role": "user", "content": "3+4="}], "answer": "7"}
{"messages": [{"role": "user", "content": "5+1="}], "answer": "6"}
"""
GSM8K = '{"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = 7\\n#### 7"}\n'
DAPO = '{"prompt": [{"role": "user", "content": "3+4="}], "reward_model": {"ground_truth": "7", "style": "rule"}}\n'
REWARD = """\
async def rises(ctx, trajectory):
    return float(ctx.text == ctx.prompt.answer)
"""
WALK = """\
class Config:
    action_lookup = {1: "Back", 2: "Ahead"}

class Walk:
    def __init__(self, config):
        self.config = config

    def reset(self, seed=None):
        return "Which way?"
"""
LONG = 8
"""Maximum number of lines of a file that the page shows."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that new users make."""

    name: str
    command: str
    """Arguments after `slimx`."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Changed or additional files of the run's directory, by path."""


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written)
    return written.getvalue()


def _prompts(*lines: Any) -> dict[str, str]:
    return {"prompts.jsonl": "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)}


def _hooks(*lines: str) -> dict[str, str]:
    return {"hooks.py": "\n".join(lines).rstrip() + "\n"}


def _script(*lines: str) -> dict[str, str]:
    return {"run.sh": "\n".join(lines) + "\n"}


USER = {"role": "user", "content": "3+4="}
TORN = _parquet([{"question": "3+4=", "answer": "7"}])[:-20]
LATIN_1 = '{"messages": [{"role": "user", "content": "Où est-il ?"}], "answer": "ici"}\n'.encode("latin-1")
MISTAKES = (
    # The command line.
    Mistake("a command that is spelt wrong", "trian run.yaml"),
    Mistake("a command of another program", "run run.yaml"),
    Mistake("no file", "train"),
    Mistake("an option that is spelt wrong", "plan run.yaml --sugest"),
    Mistake("an option of another command", "train run.yaml --suggest"),
    Mistake("a file that is not there", "train rnu.yaml"),
    Mistake("a directory instead of its file", "train model"),
    Mistake("an override before the file", "train schedule.steps=5 run.yaml"),
    Mistake("an override with spaces", "train run.yaml schedule.steps = 5"),
    Mistake("an override with a colon", "train run.yaml schedule.steps:5"),
    Mistake("a key and its value in one argument", "train run.yaml 'schedule.steps 5'"),
    Mistake("an algorithm in capitals", "train run.yaml algorithm.name=GRPO"),
    Mistake("a loss in capitals", "train run.yaml algorithm.loss=Clip"),
    Mistake("the home of a user that there is not", "train run.yaml run.dir=~nosuchuser/run"),
    Mistake("weights in a directory that is not there", "train run.yaml trainer.load=/nosuch/weights"),
    Mistake("a run of generation that cannot be written", "generate run.yaml run.dir=/proc/sums"),
    Mistake("a checkpoint that is not there", "eval run.yaml eval.prompts=prompts.jsonl --checkpoint nosuch"),
    Mistake("an override of a whole section by a number", "train run.yaml schedule=5"),
    Mistake("an unclosed list on the command line", "train run.yaml 'rollout.engines=[{tensor: 2'"),
    Mistake("two configuration files", "train run.yaml other.yaml", {"other.yaml": "schedule: {steps: 5}\n"}),
    Mistake("--config before the file", "train --config run.yaml"),
    Mistake("a webhook among the alerts", "train run.yaml alerts.webhook=https://example.com"),
    Mistake("a directory as the file of init", "init --model model --prompts prompts.jsonl --out model"),
    Mistake("an unwritable report", "report runs/sums --out /proc/report.html", {"runs/sums/metrics.jsonl": ""}),
    Mistake("a report of the YAML file", "report run.yaml"),
    Mistake("a comparison of one run", "report --compare runs/sums", {"runs/sums/metrics.jsonl": ""}),
    Mistake("a comparison of a run with itself", "report a a --compare", {"a/metrics.jsonl": ""}),
    Mistake("a comparison with no run", "report a b --compare", {"a/metrics.jsonl": ""}),
    Mistake("a live page of a run and itself", "watch a --compare a", {"a/config.yaml": "run: {dir: a}\n"}),
    Mistake("a live page of a run and of none", "watch a --compare b", {"a/config.yaml": "run: {dir: a}\n"}),
    Mistake("status of a run that never began", "status run.yaml"),
    Mistake("rollouts of the YAML file", "rollouts run.yaml"),
    # Launch scripts of other frameworks.
    Mistake("a launch script that is not there", "from-slime rnu.sh"),
    Mistake("a launch script of verl for from-slime", "from-slime run.sh", _script("python3 -m verl.trainer.main_ppo")),
    Mistake("a launch script of slime for from-verl", "from-verl run.sh", _script("python3 train.py --colocate")),
    Mistake("a launch script of slime for from-trl", "from-trl run.sh", _script("python3 train.py --colocate")),
    Mistake("a script that starts nothing", "from-slime run.sh", _script("pip install -e .")),
    Mistake("a variable that a script does not set", "from-slime run.sh", _script("python3 train.py --save $BASE/x")),
    Mistake("a quote that a script never closes", "from-verl run.sh", _script('python3 train.py --save "x')),
    Mistake(
        "a loop that a script never closes",
        "from-slime run.sh",
        _script("for i in 1 2; do\n  python3 train.py --lr $i"),
    ),
    Mistake("a script without an end", "from-slime run.sh", _script("A=x; while true; do A=$A$A; done")),
    Mistake("a script of another train.py", "from-slime run.sh", _script("python3 vision/train.py --epochs 3")),
    Mistake("a number in words in a script", "from-slime run.sh", _script("python3 train.py --num-rollout ten")),
    Mistake("a configuration of slimx for from-verl", "from-verl run.yaml"),
    Mistake(
        "a configuration that exists", "from-slime run.sh --out run.yaml", _script("python3 train.py --hf-checkpoint m")
    ),
    Mistake("a notebook for from-trl", "from-trl grpo.ipynb", {"grpo.ipynb": "{}"}),
    Mistake("a Python file of TRL with an error", "from-trl grpo.py", {"grpo.py": "GRPOConfig(\n"}),
    Mistake("a trainer that slimx does not have", "from-trl run.sh", _script("trl kto --model_name_or_path m")),
    Mistake(
        "a switch of verl by an unset variable",
        "from-verl run.sh",
        _script("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=$KL"),
    ),
    Mistake("a flag of slime after its script", "from-slime run.sh --colocate", _script("python3 train.py")),
    Mistake("a variable without a value", "from-slime run.sh BASE", _script("python3 train.py")),
    Mistake("alerts of the YAML file", "alerts run.yaml"),
    Mistake("an archive of the model's directory", "pack model"),
    Mistake("an archive over a file", "pack run.yaml --out run.yaml"),
    Mistake("an archive with all rollouts", "pack run.yaml --rollouts 1000"),
    # The YAML file.
    Mistake("a misspelt key", "train run.yaml", {"run.yaml": RUN + "reward: {funtion: hooks.rises}\n"}),
    Mistake("a webhook of an unknown service", "train run.yaml alerts.webhook_form=teams"),
    Mistake("an alert that there is not", "train run.yaml 'alerts.disabled=[gaps]'"),
    Mistake("a misspelt section", "train run.yaml", {"run.yaml": RUN + "rewards: {function: hooks.rises}\n"}),
    Mistake("a section twice", "train run.yaml", {"run.yaml": RUN + "schedule: {max_staleness: 1}\n"}),
    Mistake("a tab", "train run.yaml", {"run.yaml": RUN + "reward:\n\tfunction: hooks.rises\n"}),
    Mistake("a brace that is never closed", "train run.yaml", {"run.yaml": RUN + "trainer: {world_size: 2\n"}),
    Mistake("a list that is never closed", "train run.yaml", {"run.yaml": RUN + "trainer: {betas: [0.9, 0.99\n"}),
    Mistake("no space after a colon", "train run.yaml", {"run.yaml": RUN + "eval: {every:5}\n"}),
    Mistake(
        "a section without its keys", "train run.yaml", {"run.yaml": RUN.replace("schedule: {steps: 2}", "track:")}
    ),
    Mistake("an empty file", "train run.yaml", {"run.yaml": ""}),
    Mistake("JSON lines instead of YAML", "train prompts.jsonl"),
    Mistake("no model", "train run.yaml", {"run.yaml": RUN.replace("model: {path: model}\n", "")}),
    Mistake("no prompts", "train run.yaml", {"run.yaml": RUN.replace("  prompts: prompts.jsonl\n", "")}),
    Mistake("a number in words", "train run.yaml schedule.steps=ten"),
    Mistake("a word that is no choice", "train run.yaml algorithm.name=gpro"),
    Mistake("a word of another choice", "train run.yaml publish.transport=cuda_ipc"),
    Mistake("a percentage", "train run.yaml rollout.sampling.top_p=95"),
    Mistake("one engine that is no list", "train run.yaml 'rollout.engines={tensor: 1}'"),
    Mistake("an interpolation of a key that is not there", "train run.yaml 'run.dir=runs/${run.nam}'"),
    # Names of other programs.
    Mistake("the learning rate under trainer", "train run.yaml trainer.lr=1e-5"),
    Mistake("rollout.n, as in verl", "train run.yaml rollout.n=8"),
    Mistake("the temperature under rollout", "train run.yaml rollout.temperature=0.8"),
    Mistake("slime's batch size", "train run.yaml --rollout-batch-size 32"),
    Mistake("slime's prompts", "train run.yaml --prompt-data prompts.jsonl"),
    Mistake("slime's name of an algorithm", "train run.yaml --advantage-estimator grpo"),
    Mistake("a size of Megatron-LM", "train run.yaml --tensor-model-parallel-size 2"),
    Mistake("verl's group", "train run.yaml actor_rollout_ref.rollout.n=8"),
    Mistake("verl's algorithm", "train run.yaml algorithm.adv_estimator=grpo"),
    Mistake("verl's GPUs", "train run.yaml trainer.n_gpus_per_node=8"),
    Mistake("TRL's group", "train run.yaml --num_generations 8"),
    Mistake("TRL's KL coefficient in the file", "train run.yaml", {"run.yaml": RUN + "algorithm: {beta: 0.04}\n"}),
    # The model.
    Mistake("a model that is not there", "train run.yaml model.path=modle"),
    Mistake("a name of the Hugging Face Hub", "train run.yaml model.path=Qwen/Qwen3-0.6B"),
    Mistake("start weights from the Hub", "train run.yaml trainer.load=Qwen/Qwen3-0.6B"),
    Mistake("a model without weights", "train run.yaml trainer.load=bare", {"bare/config.json": "{}"}),
    Mistake(
        "an architecture that is not known",
        "train run.yaml model.path=bert",
        {"bert/config.json": '{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'},
    ),
    Mistake("a directory of models that is not there", "train run.yaml model.path=models/tiny"),
    Mistake(
        "a run instead of its weights",
        "eval run.yaml eval.prompts=prompts.jsonl --checkpoint runs/sums",
        {f"runs/sums/checkpoints/iter_0000100/slimx/{name}.json": "{}" for name in ("run", "manifest")},
    ),
    Mistake(
        "a run as start weights",
        "train run.yaml trainer.load=runs/first",
        {"runs/first/checkpoints/latest_checkpointed_iteration.txt": "100"},
    ),
    Mistake("a torn config.json", "train run.yaml", {"model/config.json": '{"model_type": "qwen3_m'}),
    Mistake("more tensor ranks than there are", "train run.yaml trainer.tensor=4"),
    Mistake("heads that ranks cannot share", "train run.yaml trainer.tensor=3 trainer.world_size=3"),
    Mistake("heads that an engine's ranks cannot share", "train run.yaml rollout.engines.0.tensor=3"),
    Mistake("as many ranks as experts cannot share", "train run.yaml trainer.expert=2 trainer.world_size=3"),
    Mistake("experts that ranks cannot share", "train run.yaml trainer.expert=3 trainer.world_size=3"),
    Mistake("a template argument that nothing reads", "plan run.yaml 'rollout.template={enable_thinking: false}'"),
    Mistake("the same, when training", "train run.yaml 'rollout.template={enable_thinking: false}'"),
    Mistake("a system prompt that the template refuses", "train run.yaml rollout.system=Think"),
    # Prompts.
    Mistake("prompts that are not there", "train run.yaml rollout.prompts=promts.jsonl"),
    Mistake("prompts that a recipe names", "train run.yaml rollout.prompts=data/gsm8k-train.jsonl"),
    Mistake("an empty file of prompts", "train run.yaml", _prompts()),
    Mistake("GSM8K as it was published", "train run.yaml", {"prompts.jsonl": GSM8K}),
    Mistake("DAPO as it was published", "train run.yaml", {"prompts.jsonl": DAPO}),
    Mistake("messages that are a text", "train run.yaml", _prompts({"messages": "3+4=", "answer": "7"})),
    Mistake("messages that are texts", "train run.yaml", _prompts({"messages": ["3+4="], "answer": "7"})),
    Mistake("turns of ShareGPT", "train run.yaml", _prompts({"messages": [{"from": "human", "value": "3+4="}]})),
    Mistake("ShareGPT's name too", "train run.yaml", _prompts({"conversations": [{"from": "human", "value": "3+4="}]})),
    Mistake("an answer that is a list", "train run.yaml", _prompts({"messages": [USER], "answer": ["7"]})),
    Mistake("no messages", "train run.yaml", _prompts({"answer": "7"})),
    Mistake("an id twice", "train run.yaml", _prompts(*[{"id": "a", "messages": [USER], "answer": "7"}] * 2)),
    Mistake("a file in Latin-1", "train run.yaml", {"prompts.jsonl": LATIN_1}),
    Mistake("a data set of the Hub without hf://", "train run.yaml rollout.prompts=openai/gsm8k"),
    Mistake("a comma too many", "train run.yaml", _prompts('{"messages": [], }')),
    Mistake("a line that is cut off", "train run.yaml", _prompts('{"messages": [{"role": "user", "con')),
    Mistake("one long list of JSON", "train run.yaml", _prompts([{"messages": [USER], "answer": "7"}])),
    Mistake("no answers, where the reward compares", "train run.yaml", _prompts({"messages": [USER]})),
    Mistake("a prompt that is too long", "train run.yaml rollout.max_prompt_tokens=4"),
    Mistake("a torn parquet file", "train run.yaml rollout.prompts=prompts.parquet", {"prompts.parquet": TORN}),
    Mistake("a field that a file does not have", "train run.yaml 'rollout.fields={prompt: question}'"),
    Mistake("a field that is no field", "train run.yaml 'rollout.fields={question: prompt}'"),
    Mistake("a short name of a data set", "data dapo out.jsonl --from gsm8k.jsonl", {"gsm8k.jsonl": GSM8K}),
    Mistake("another data set's file", "data dapo-math-17k out.jsonl --from gsm8k.jsonl", {"gsm8k.jsonl": GSM8K}),
    Mistake("data without the file to write", "data gsm8k"),
    Mistake("data check of nothing", "data check nowhere.jsonl"),
    Mistake("held-out prompts that are not there", "train run.yaml eval.prompts=heldout.jsonl eval.every=1"),
    Mistake("an evaluation without prompts", "train run.yaml eval.every=1"),
    Mistake("a held-out set without its file", "train run.yaml 'eval.prompts={sums: {samples: 4}}'"),
    Mistake(
        "an unknown key of a held-out set", "train run.yaml 'eval.prompts={sums: {path: prompts.jsonl, sample: 4}}'"
    ),
    Mistake(
        "several greedy answers for a held-out set",
        "train run.yaml 'eval.prompts={sums: {path: prompts.jsonl, samples: 4}}'",
    ),
    Mistake(
        "a held-out set that is not there",
        "train run.yaml 'eval.prompts={sums: {path: heldout.jsonl, max_new_tokens: 8}}'",
    ),
    Mistake(
        "held-out answers that are too long", "train run.yaml eval.prompts=prompts.jsonl eval.max_new_tokens=100000"
    ),
    Mistake(
        "a held-out set whose answers are greedy",
        "train run.yaml eval.samples=4 eval.temperature=1 'eval.prompts={sums: {path: prompts.jsonl, temperature: 0}}'",
    ),
    Mistake(
        "a held-out set with fewer answers than k",
        "train run.yaml eval.pass_at=[4] 'eval.prompts={sums: {path: prompts.jsonl, samples: 2, temperature: 1}}'",
    ),
    Mistake("a held-out set with a slash in its name", "train run.yaml 'eval.prompts={math/sums: prompts.jsonl}'"),
    Mistake("a held-out set without a name", "train run.yaml 'eval.prompts={\"\": {path: prompts.jsonl, samples: 4}}'"),
    Mistake("evaluation engines without prompts", "train run.yaml 'eval.engines=[{max_total_tokens: 4096}]'"),
    Mistake(
        "evaluation engines with the name of others",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{name: actor, max_total_tokens: 4096}]'",
    ),
    Mistake(
        "running servers as evaluation engines",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{urls: [\"http://127.0.0.1:30000\"]}]'",
    ),
    Mistake(
        "evaluation engines of several policies",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{count: 1}]' 'policies={judge: {}}'",
    ),
    Mistake(
        "evaluation engines with external servers' keys",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{api_key_env: KEY}]'",
    ),
    Mistake(
        "evaluation engines that exact mode does not support",
        "train run.yaml eval.prompts=prompts.jsonl numerics.mode=exact 'eval.engines=[{tensor: 2, dp_attention: 2}]'",
    ),
    Mistake(
        "evaluation engines that are split wrongly",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{tensor: 2, expert: 3}]'",
    ),
    Mistake(
        "an unknown key of evaluation engines",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{tensr: 2}]'",
    ),
    Mistake(
        "evaluation engines with an argument that SGLang lacks",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{sglang: {mem_fraction: 0.8}}]'",
    ),
    Mistake("a list of held-out files", "train run.yaml 'eval.prompts=[prompts.jsonl]'"),
    # Hooks.
    Mistake("a misspelt function", "train run.yaml reward.function=hooks.rasies", _hooks(REWARD)),
    Mistake("a misspelt module", "train run.yaml reward.function=hoooks.rises", _hooks(REWARD)),
    Mistake("a path instead of a module", "train run.yaml reward.function=hooks.py", _hooks(REWARD)),
    Mistake("a path and a function", "train run.yaml reward.function=hooks.py:rises", _hooks(REWARD)),
    Mistake("a folder and a function", "train run.yaml reward.function=./hooks.rises", _hooks(REWARD)),
    Mistake("the file of a run that a script started", "train run.yaml reward.function=__main__.reward"),
    Mistake("a reward that is not one of TRL", "train run.yaml reward.function=trl:hooks.rises", _hooks(REWARD)),
    Mistake("a filter of TRL", "train run.yaml rollout.filter=trl:hooks.rises", _hooks(REWARD)),
    Mistake("a function without its module", "train run.yaml reward.function=rises", _hooks(REWARD)),
    Mistake("a misspelt reward of slimx", "train run.yaml reward.function=maths"),
    Mistake("no function, only its module", "train run.yaml reward.function=slimx.extras.rewards.math"),
    Mistake(
        "a reward of TRL without its prefix",
        "train run.yaml reward.function=hooks.rises",
        _hooks("def rises(prompts, completions, **kwargs):", "    return [1.0]"),
    ),
    Mistake(
        "a reward of other arguments",
        "train run.yaml reward.function=hooks.rises",
        _hooks("async def rises(prompt, response, answer):", "    return 1.0"),
    ),
    Mistake(
        "a reward with a syntax error",
        "train run.yaml reward.function=hooks.rises",
        _hooks("async def rises(ctx, trajectory)", "    return 1.0"),
    ),
    Mistake(
        "a reward that imports what is not installed",
        "train run.yaml reward.function=hooks.rises",
        _hooks("import sympyy", "", "async def rises(ctx, trajectory):", "    return 1.0"),
    ),
    Mistake(
        "an option that the reward does not have",
        "train run.yaml reward.function=math 'reward.options={tolerence: 0.1}'",
    ),
    Mistake(
        "an option that a reward of one's own does not have",
        "train run.yaml reward.function=hooks.rises 'reward.options={weigth: 2}'",
        _hooks("async def rises(ctx, trajectory, weight=1.0, floor=0.0):", "    return weight"),
    ),
    Mistake(
        "a reward that raises",
        "doctor --hooks run.yaml reward.function=hooks.rises",
        _hooks("async def rises(ctx, trajectory):", "    return {'7': 1.0}[ctx.text + '!']"),
    ),
    Mistake(
        "a reward that returns a word",
        "doctor --hooks run.yaml reward.function=hooks.rises",
        _hooks("async def rises(ctx, trajectory):", "    return 'right'"),
    ),
    Mistake(
        "a reward that returns nothing",
        "doctor --hooks run.yaml reward.function=hooks.rises",
        _hooks("async def rises(ctx, trajectory):", "    ctx.text.strip()"),
    ),
    Mistake(
        "a generate hook that returns a text",
        "doctor --hooks run.yaml rollout.generate=hooks.answer",
        _hooks("async def answer(ctx, prompt):", "    return 'seven'"),
    ),
    # Environments of other projects.
    *(
        Mistake(
            name,
            "train run.yaml reward.function=multi_turn rollout.generate=multi_turn "
            f"'rollout.options={{environment: {environment}, environment_options: {{{options}}}}}'",
            {"walks.py": WALK} if "walks" in options else {},
        )
        for name, environment, options in (
            ("RAGEN's environment without RAGEN", "gymnasium", "make: ragen.env.sokoban.env.SokobanEnv"),
            (
                "a configuration of another name",
                "gymnasium",
                "make: walks.Walk, make_options: {config: {make: walks.WalkConfig}}",
            ),
            (
                "a configuration without an option",
                "gymnasium",
                "make: walks.Walk, make_options: {config: {make: walks.Config, size: 6}}",
            ),
            (
                "names of actions that are elsewhere",
                "gymnasium",
                "make: walks.Walk, make_options: {config: {make: walks.Config}}, text_options: {actions: names}",
            ),
            (
                "nothing between two actions",
                "gymnasium",
                'make: walks.Walk, make_options: {config: {make: walks.Config}}, text_options: {separator: ""}',
            ),
            ("an address of NeMo Gym without http", "nemo_gym", "url: localhost:8000"),
            ("an environment of NeMo Gym without its address", "nemo_gym", ""),
        )
    ),
    # Runs.
    Mistake("a run that must go on, and never began", "train run.yaml run.resume=must"),
    Mistake("a run that must not go on", "train run.yaml run.resume=never", {"runs/sums/metrics.jsonl": ""}),
    Mistake("a fork of a run instead of its checkpoint", "train run.yaml run.fork=runs/old", {"runs/old/a": ""}),
    Mistake("an unwritable run.dir", "train run.yaml run.dir=/proc/sums"),
    Mistake(
        "an unwritable publish.directory", "train run.yaml publish.transport=disk publish.directory=/proc/published"
    ),
    Mistake(
        "three wrong paths",
        "train run.yaml model.path=modle rollout.prompts=prompts.json reward.function=hoooks.rises",
        _hooks(REWARD),
    ),
    Mistake(
        "a step whose rollouts are no longer saved",
        "rollouts runs/sums --step 1",
        {"runs/sums/config.yaml": RUN, "runs/sums/rollouts/step-0000091.groups": b""},
    ),
    Mistake("a file as run.dir", "train run.yaml run.dir=prompts.jsonl"),
    Mistake("a tracker that is not installed", "train run.yaml track.wandb=true"),
    # Installation.
    Mistake("a quickstart of no steps", "quickstart --steps 0"),
    Mistake("a quickstart in a file", "quickstart --dir prompts.jsonl"),
    Mistake("overrides of the quickstart", "quickstart schedule.steps=5"),
    Mistake("a lock that does not exist", "setup --lock cuda"),
    Mistake("an option of setup that is spelt wrong", "setup --lok cpu"),
    # Lists, keys and first files.
    Mistake("appending to what is no list", "train run.yaml schedule.steps+=3"),
    Mistake("appending to an unknown key", "train run.yaml 'rollout.engnes+={tensor: 2}'"),
    Mistake("appending an entry with an unknown key", "train run.yaml 'rollout.engines+={name: b, tensr: 2}'"),
    Mistake("appending a text to a list of numbers", "train run.yaml rollout.sampling.stop_token_ids+=end"),
    Mistake("a word that no key contains", "keys temprature"),
    Mistake("a key of a section that does not have it", "keys trainer.temperature"),
    Mistake("a first file without a terminal to ask", "init --out new.yaml"),
    Mistake("a first file without prompts", "init --model model --out new.yaml"),
    Mistake("a first file that exists", "init --model model --prompts prompts.jsonl"),
    Mistake("a first file for a model that is not there", "init --model modle --prompts prompts.jsonl --out new.yaml"),
    Mistake("an unknown machine", "init --model model --prompts prompts.jsonl --out new.yaml --gpu a100"),
    Mistake(
        "nodes without their GPUs", "init --model model --prompts prompts.jsonl --out new.yaml --gpu cpu --nodes 2"
    ),
    Mistake(
        "GPUs that do not divide among nodes",
        "init --model model --prompts prompts.jsonl --out new.yaml --gpu h100 --gpus 8 --nodes 3",
    ),
    Mistake("an option of init that is spelt wrong", "init --modle model"),
)

MISTAKES += tuple(
    Mistake(
        f"{program}: {line}", f"train run.yaml {shlex.join(line.split(' ')) if '[' in line or '$' in line else line}"
    )
    for program, lines in (
        ("slime", typed_names.SLIME),
        ("verl", typed_names.VERL),
        ("TRL and OpenRLHF", typed_names.TRL),
        ("a slip", typed_names.SLIPS),
    )
    for line in lines.splitlines()
)


def page() -> str:
    """Returns the page: for every mistake the changed files, the command, its output and its exit status."""
    return "\n".join(map(transcript, MISTAKES))


def transcript(mistake: Mistake) -> str:
    """Returns one mistake as the page shows it."""
    lines = [f"# {mistake.name}"]
    for path, content in mistake.files.items():
        changed = _changed(path, content)
        lines += [f"{path}:", *(f"  | {line}" for line in changed)] if changed else [f"{path}: (as it is)"]
    with _named(mistake), mock.patch.object(session, "run_with_ray", side_effect=_started):
        status, output = typed_in(_files() | dict(mistake.files), shlex.split(mistake.command))
    if mistake.command.startswith("plan "):
        output = re.sub(r"^(?!slimx: ).*\n", "", output, flags=re.MULTILINE)  # the plan itself is no message
    output = re.sub(r"(?<= )\d+\.\d\d$", "S", output, flags=re.MULTILINE)  # seconds of the table of --hooks
    return "\n".join([*lines, f"$ slimx {mistake.command}", f"{output}[{status}]", ""])


@contextlib.contextmanager
def _named(mistake: Mistake) -> Iterator[None]:
    """Adds the mistake's name to errors that are raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the mistake: {mistake.name}")
        raise


def _started(*_: Any) -> None:
    raise AssertionError("this mistake is not refused: a run would start")


def _changed(path: str, content: str | bytes) -> list[str]:
    """Returns the lines of a file that differ from the valid run's. Long and binary lines are left out."""
    if isinstance(content, bytes):
        return []
    original = _files().get(path, b"")
    before = (original if isinstance(original, str) else original.decode()).splitlines()
    return [line.replace("\t", "<TAB>") for line in content.splitlines() if line not in before][:LONG]


@functools.cache
def _files() -> dict[str, str | bytes]:
    """Returns the files of a valid run, by path."""
    with tempfile.TemporaryDirectory() as name:
        make_model(name, seed=1)
        model = {f"model/{file.name}": file.read_bytes() for file in Path(name).iterdir()}
    return {"run.yaml": RUN, "prompts.jsonl": PROMPTS, **model}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
