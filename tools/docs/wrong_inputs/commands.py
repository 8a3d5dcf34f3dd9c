"""Mistakes on the command line: names, options and overrides; and of the commands setup, quickstart and init."""

from __future__ import annotations

from tools.docs.wrong_inputs.mistake import Mistake

COMMAND_LINE = (
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
    Mistake("a report that is no page", "report runs/sums --out report.pdf", {"runs/sums/metrics.jsonl": ""}),
    Mistake("a report of a run and itself", "report a a", {"a/metrics.jsonl": ""}),
    Mistake("a comparison of one run", "report --compare runs/sums", {"runs/sums/metrics.jsonl": ""}),
    Mistake("a comparison of a run with itself", "report a a --compare", {"a/metrics.jsonl": ""}),
    Mistake("a comparison with no run", "report a b --compare", {"a/metrics.jsonl": ""}),
    Mistake("a live page of a run and itself", "watch a --compare a", {"a/config.yaml": "run: {dir: a}\n"}),
    Mistake("a live page at a host that there is not", "watch a --host h..h", {"a/config.yaml": "run: {dir: a}\n"}),
    Mistake("a live page of a run and of none", "watch a --compare b", {"a/config.yaml": "run: {dir: a}\n"}),
    Mistake("status of a run that never began", "status run.yaml"),
    Mistake("rollouts of the YAML file", "rollouts run.yaml"),
)
INSTALLATION = (
    Mistake("a quickstart of no steps", "quickstart --steps 0"),
    Mistake("a quickstart in a file", "quickstart --dir prompts.jsonl"),
    Mistake("overrides of the quickstart", "quickstart schedule.steps=5"),
    Mistake("a lock that does not exist", "setup --lock cuda"),
    Mistake("an option of setup that is spelt wrong", "setup --lok cpu"),
)
LISTS_AND_FIRST_FILES = (
    Mistake("appending to what is no list", "train run.yaml schedule.steps+=3"),
    Mistake("appending to an unknown key", "train run.yaml 'rollout.engnes+={tensor: 2}'"),
    Mistake("appending an entry with an unknown key", "train run.yaml 'rollout.engines+={name: b, tensr: 2}'"),
    Mistake("appending a text to a list of numbers", "train run.yaml rollout.sampling.stop_token_ids+=end"),
    Mistake("an engine group by its name", "train run.yaml rollout.engines.actor.tensor=2"),
    Mistake("the last engine group by -1", "train run.yaml rollout.engines.-1.tensor=2"),
    Mistake("a number instead of engine groups", "train run.yaml rollout.engines=2"),
    Mistake("a name instead of evaluation engines", "train run.yaml eval.engines=actor"),
    Mistake("a section removed as with Hydra", "train run.yaml '~eval'"),
    Mistake("one rank on two machines", "train run.yaml rollout.engines.0.nodes=2"),
    Mistake(
        "engines of a policy that are split wrongly",
        "train run.yaml 'policies={judge: {engines: [{name: judge, tensor: 2, nodes: 3}]}}'",
    ),
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
