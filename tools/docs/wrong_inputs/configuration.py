"""Mistakes in the YAML file: its form, names of other programs, and the model."""

from __future__ import annotations

from tools.docs.wrong_inputs.mistake import RUN, Mistake

FILE = (
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
)
NAMES = (
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
)
MODEL = (
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
    Mistake("workers without a number", "train run.yaml rollout.workers=many"),
    Mistake("a port that several workers would share", "train run.yaml rollout.workers=3 rollout.proxy.port=8000"),
    Mistake("resources of the driver", "train run.yaml rollout.workers=1 rollout.worker_resources.memory=2"),
    Mistake("more tensor ranks than there are", "train run.yaml trainer.tensor=4"),
    Mistake("heads that ranks cannot share", "train run.yaml trainer.tensor=3 trainer.world_size=3"),
    Mistake("heads that an engine's ranks cannot share", "train run.yaml rollout.engines.0.tensor=3"),
    Mistake("as many ranks as experts cannot share", "train run.yaml trainer.expert=2 trainer.world_size=3"),
    Mistake("experts that ranks cannot share", "train run.yaml trainer.expert=3 trainer.world_size=3"),
    Mistake("a template argument that nothing reads", "plan run.yaml 'rollout.template={enable_thinking: false}'"),
    Mistake("the same, when training", "train run.yaml 'rollout.template={enable_thinking: false}'"),
    Mistake("a system prompt that the template refuses", "train run.yaml rollout.system=Think"),
)
