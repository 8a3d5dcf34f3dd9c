"""Settings of a run for a model, prompts and a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.extras.foreign.commented_yaml import loaded
from slimx.extras.init.machine import Target
from slimx.extras.init.prompts import Prompts
from slimx.extras.init.settings import Setting, file_of
from slimx.extras.planner.plan.suggest import suggest_layouts
from slimx.extras.planner.plan.suggest_engines import suggest_engines
from slimx.extras.planner.planning import run_plan
from slimx.extras.planner.record import EngineSuggestion
from slimx.layout.kernels import unpublishable
from slimx.models.families import ModelSpec, read_model
from slimx.preflight.hardware import GIB, machine_of
from slimx.rollout.hook_loading import load_hooks, load_rewards

SMALL = 50_000_000
"""Number of parameters up to which a model learns in minutes on a CPU, at a high learning rate."""
CPU_BYTES = 20
"""Bytes per parameter on a CPU: weights, gradients and Adam's moments of the trainer, and weights of the engine, in
fp32."""
STATIC = (0.8, 0.7, 0.6, 0.5)
"""Fractions of GPU memory for an engine (`mem_fraction_static`), in the order in which they are tried."""
CONCURRENT = 64
"""Number of the longest rollouts that all engines together should hold."""
WIDEST = 8
"""Largest tensor-parallel size of a server without expert parallelism: more ranks split experts into too small
parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Choices of the user; None leaves a choice to `settings_of`."""

    model: str
    eval: Prompts | None
    reward: str
    why: str
    """Reason for the reward, as a comment."""
    algorithm: str
    steps: int | None
    max_tokens: int | None
    directory: str


def settings_of(wishes: Wishes, prompts: Prompts, target: Target) -> list[Setting]:
    """Returns the settings of a run that passes `slimx plan`. Raises SlimxError if the model cannot be read or does not
    fit on the machine."""
    spec = read_model(wishes.model)
    parameters = sum(math.prod(shape) for shape in spec.table.checkpoint_shapes().values())
    small = target.gpu is None and parameters <= SMALL
    if target.gpu is None:
        _check_memory(wishes.model, parameters)
    odd = max(1, target.gpus // (target.gpus & -target.gpus or 1))  # every data-parallel size must divide the batch
    largest = min(32 if small else 64 if target.gpu else 2, prompts.count)
    per_step = odd * 2 ** max(0, int(math.log2(largest / odd)))
    group = 8 if target.gpu or small else 4
    lengths = [one.longest for one in (prompts, wishes.eval) if one is not None and one.longest is not None]
    longest_prompt = _rounded(max(lengths, default=None), 2048)
    positions = spec.hf.get("max_position_embeddings")
    if positions is not None and longest_prompt >= positions:  # no room for a response
        longest_prompt = max(lengths, default=positions // 2)
    new_tokens = wishes.max_tokens or _new_tokens(wishes.reward, prompts, target, positions, longest_prompt)
    longest = longest_prompt + new_tokens
    epoch = -(-prompts.count // per_step)
    steps = max(20, min(200, epoch)) if wishes.steps is None else wishes.steps
    measured = "counted" if prompts.exact else "estimated from a part of the file"
    note = "not measured: the model's tokenizer is missing, or transformers is not installed"
    if prompts.longest is not None:
        note = f"tokens of the longest prompt, {measured}: {max(lengths)}"
    settings = [
        Setting("run.name", Path(wishes.directory).name, "shown in reports and trackers"),
        Setting("run.dir", wishes.directory, "all files of the run; the same command continues it"),
        Setting("model.path", wishes.model, f"{spec.hf['architectures'][0]}, {_size(parameters)} parameters"),
        *_machine(target),
        Setting("trainer.world_size", target.gpus or 1, "all GPUs" if target.gpus else "one process"),
        Setting(
            "trainer.max_tokens_per_microbatch", max(longest, 16384 if target.gpu else 1024), "tokens trained at once"
        ),
        Setting(
            "trainer.optimizer.lr", 1e-4 if small else 1e-6, "learning rate" + (" of a tiny model" if small else "")
        ),
        Setting("rollout.prompts", prompts.path, f"prompts: {prompts.count:,}; slimx data check {prompts.path}"),
    ]
    if prompts.fields:
        settings.append(Setting("rollout.fields", prompts.fields, "columns of the file"))
    settings += [
        Setting("rollout.prompts_per_step", per_step, f"steps of an epoch: {epoch:,}"),
        Setting("rollout.group_size", group, "responses per prompt, compared with each other"),
        Setting("rollout.max_prompt_tokens", longest_prompt, note),
        Setting("rollout.sampling.max_new_tokens", new_tokens, "longer responses are cut off"),
        Setting("rollout.sampling.temperature", 1.0, "exploration; 0 would learn nothing"),
        Setting("rollout.engines", [_cpu_engine(longest)], "SGLang servers: docs/engines.md"),
        Setting("reward.function", wishes.reward, wishes.why),
        Setting("algorithm.name", wishes.algorithm, "preset of loss and advantages"),
        *([Setting("critic.placement", "shared", "value model on the trainers' ranks")] * (wishes.algorithm == "ppo")),
        Setting("schedule.steps", steps, "optimizer steps in all"),
    ]
    if target.gpu:
        settings.append(Setting("schedule.colocate", True, "trainers and engines take turns on the same GPUs"))
        settings.append(Setting("publish.staging", "bucket", "new weights reach engines bucket by bucket"))
    settings += [
        Setting("checkpoint.every", max(1, steps // 5), "steps between checkpoints"),
        Setting("checkpoint.keep", 2, "older checkpoints are removed"),
    ]
    if wishes.eval:
        name = Path(wishes.eval.path).stem
        settings.append(Setting("eval.prompts", {name: wishes.eval.path}, f"held-out prompts: {wishes.eval.count:,}"))
        if wishes.eval.fields:
            settings.append(Setting("eval.fields", wishes.eval.fields, "columns of the file"))
        settings.append(Setting("eval.every", max(1, steps // 5), "steps between evaluations"))
    settings.append(Setting("track.tensorboard", True, "curves for TensorBoard; also: slimx watch DIR"))
    return _laid_out(settings, spec, target) if target.gpu else settings


def checked_file(settings: Iterable[Setting], title: str, name: str) -> str:
    """Returns the text of the file named `name`, after it has passed `load_config` and `slimx plan`, and its hooks can
    be loaded. Raises SlimxError if it does not, or if they cannot."""
    settings = list(settings)
    text = file_of(settings, title)
    config = loaded(text, name)
    algorithm = config.algorithm
    if algorithm.loss.demonstrated or algorithm.advantages.demonstrated or algorithm.scores:
        raise SlimxError(
            f"slimx init writes runs that sample and grade responses, but {algorithm.name} learns from given "
            "ones; start from configs/moe/quickstart-sft.yaml or configs/moe/quickstart-rm.yaml",
            code="init.algorithm",
            about="--algorithm",
        )
    load_hooks(config)
    violations = run_plan(config).violations
    if violations:
        raise SlimxError(violations[0], code="init.plan", about=name)
    return text


def check_reward(function: str, model: str, prompts: str) -> None:
    """Raises SlimxError if the reward hook `function` cannot be loaded for a run of `model` with the file `prompts`."""
    values = {"run.dir": "runs", "model.path": model, "rollout.prompts": prompts, "reward.function": function}
    load_rewards(load_config(values))


def _machine(target: Target) -> Iterable[Setting]:
    if target.gpu is None:
        yield Setting("numerics.dtype", "float32", "CPUs compute in fp32")
        yield Setting("cluster.device", "cpu", "add --gpu to slimx init for GPUs")
        return
    if target.memory_gib is None:
        yield Setting("cluster.gpu", target.gpu, "type that slimx plan assumes")
    else:
        yield Setting("cluster.gpu", target.gpu, f"link speeds that slimx plan assumes; these are {target.name}")
        yield Setting("cluster.gpu_memory_gib", target.memory_gib, "memory of one GPU")
    yield Setting("cluster.gpus_per_node", target.per_node, "GPUs per machine")
    yield Setting("cluster.nodes", target.nodes, "machines")
    if target.nodes > 1:
        yield Setting("cluster.ray_address", "auto", "Ray runs on all nodes: scripts/launch, docs/operations.md")


def _check_memory(model: str, parameters: int) -> None:
    needed = (parameters * CPU_BYTES) / GIB + 2
    present = psutil.virtual_memory().total / GIB
    if needed > present:
        raise SlimxError(
            f"{model} has {_size(parameters)} parameters, which need about {needed:,.0f} GiB on a CPU, but this "
            f"machine has {present:,.0f} GiB; add --gpu and --nodes for the machines that the run is for",
            code="init.memory",
            about=model,
        )


def _new_tokens(reward: str, prompts: Prompts, target: Target, positions: int | None, prompt: int) -> int:
    """Returns the maximum length of a response: as long as the answers if they are compared as a whole, else as long
    as a short chain of thought, within the model's `positions`."""
    tokens = 4096 if target.gpu else 256
    if reward == "exact" and prompts.longest_answer is not None and "no words" in prompts.why:
        tokens = _rounded(2 * prompts.longest_answer, 4)
    return tokens if positions is None else max(1, min(tokens, positions - prompt))


def _rounded(tokens: int | None, default: int) -> int:
    """Returns the next power of two, at least 4; `default` if `tokens` is None."""
    return default if tokens is None else max(4, 2 ** math.ceil(math.log2(max(1, tokens))))


def _size(parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g} {name}"
    return str(parameters)


def _cpu_engine(longest: int) -> dict[str, object]:
    """Returns the settings of a server on the CPU, which would otherwise take most of the memory."""
    return {"name": "actor", "max_total_tokens": min(65536, max(8192, 16 * _rounded(longest, 1024)))}


def _laid_out(settings: Sequence[Setting], spec: ModelSpec, target: Target) -> list[Setting]:
    """Returns the settings with the fastest layout that fits on the GPUs of `target`. Raises SlimxError if none
    fits."""
    needed = 0
    refused: tuple[str, ...] = ()
    options: dict[str, object] = {}
    if target.gpu == "gb300":
        options |= unpublishable({}, experts=spec.experts > 0, fp8=False)
    for fraction in STATIC:
        static: dict[str, object] = {"sglang": {"mem_fraction_static": fraction, **options}}
        engines = _engines(settings, spec, target, static)
        if engines is None:
            needed = max(needed, 2 * target.gpus)
            continue
        group = {"count": engines.count * (target.gpus // (engines.tensor * engines.count)), "tensor": engines.tensor}
        for key in ("expert", "dp_attention", "nodes"):
            if getattr(engines, key) > 1:
                group[key] = getattr(engines, key)
        chosen = _with(settings, "rollout.engines", [{**group, **static}])
        if engines.nodes > 1:
            shared = Setting(
                "cluster.trusted_network", True, "only this run's users reach these nodes: docs/engines.md"
            )
            at = next(index for index, one in enumerate(chosen) if one.key == "cluster.ray_address")
            chosen.insert(at + 1, shared)
        config = _config(chosen)
        for suggestion in suggest_layouts(config, spec, machine_of(config.cluster), "cuda")[0]:
            grown = [text for text in suggestion.overrides if text.startswith("trainer.world_size=")]
            if grown:
                needed = max(needed, int(grown[0].partition("=")[2]))
                continue
            placed = _placed(chosen, suggestion.overrides)
            refused = run_plan(_config(placed)).violations
            if not refused:
                return placed
    if refused:
        raise SlimxError(
            f"every layout for --gpus {target.gpus} ({target.gpu}) is refused: {refused[0]}",
            code="init.plan",
            about="--gpus",
        )
    remedy = f"try --nodes {-(-needed // target.per_node) if needed else 2 * target.nodes}"
    power = 2 ** int(math.log2(target.gpus))
    if power < target.gpus:
        remedy = f"choose another number of GPUs, such as --gpus {power}"
    raise SlimxError(
        f"no layout was found that fits on --gpus {target.gpus} ({target.gpu}, nodes: {target.nodes}); "
        f"{remedy}, or choose a smaller model or a smaller --max-tokens",
        code="init.memory",
        about="--gpus",
    )


def _engines(
    settings: Sequence[Setting], spec: ModelSpec, target: Target, static: dict[str, object]
) -> EngineSuggestion | None:
    """Returns the smallest servers on the smallest number of GPUs that, repeated on all of `target`, hold `CONCURRENT`
    rollouts or, if none do, the most; None if no server fits. `static`: further settings of a server."""
    best: tuple[int, EngineSuggestion] | None = None
    size = 1
    while size <= target.gpus:
        group: dict[str, object] = {"count": 1, "tensor": size, **static}
        if size > WIDEST and spec.experts:
            group["expert"] = size
        if size > target.per_node:
            group["nodes"] = -(-size // target.per_node)
        tried = _with(settings, "rollout.engines", [group])
        if size > target.per_node:
            tried.append(Setting("cluster.trusted_network", True))
        config = _config(tried)
        for found in suggest_engines(config, spec, machine_of(config.cluster)):
            gpus = found.tensor * found.count
            if target.gpus % gpus == 0 and (found.tensor <= WIDEST or found.expert > 1 or not spec.experts):
                concurrency = found.concurrency * (target.gpus // gpus)
                if best is None or concurrency > best[0]:
                    best = concurrency, found
        if best is not None and best[0] >= CONCURRENT:
            break
        size *= 2
    return None if best is None else best[1]


def _with(settings: Sequence[Setting], key: str, value: object) -> list[Setting]:
    """Returns the settings with another value of `key`."""
    changed = []
    for setting in settings:
        changed.append(Setting(key, value, setting.comment) if setting.key == key else setting)
    return changed


def _placed(settings: Sequence[Setting], overrides: Iterable[str]) -> list[Setting]:
    """Returns the settings with the overrides of a suggested layout, after the other keys of `trainer`."""
    placed = list(settings)
    at = next(index for index, setting in enumerate(placed) if setting.key == "trainer.world_size") + 1
    for override in overrides:
        key, _, value = override.partition("=")
        placed.insert(at, Setting(key, yaml.safe_load(value)))
        at += 1
    return placed


def _config(settings: Sequence[Setting]) -> Config:
    return loaded(file_of(settings, ""), "run.yaml")
