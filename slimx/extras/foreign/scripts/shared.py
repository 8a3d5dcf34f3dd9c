"""Parts of a configuration that the scripts of all frameworks have: ranks, engines, batches and the KL term."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from slimx.extras.foreign.meaning import ALGORITHMS, KL_KINDS
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.names import Names, rows_of, whole
from slimx.extras.foreign.scripts.translate import note_unneeded, put_number

_RECURRENT = re.compile(r"qwen3[._][56]|qwen3[-_]next|nemotron[-_](3|h)|nemotron-nano-v3", re.IGNORECASE)
"""Names of families with delta nets or state-space layers."""
_NO_MTP = re.compile(r"mimo|minimax|qwen3|gpt-oss|nemotron", re.IGNORECASE)
"""Names of families whose layers of multi-token prediction slimx does not train."""
NODE = 8
"""GPUs of a node where a script does not say how many there are."""
PROMPT_TOKENS = 2048
"""Maximum length of a prompt in tokens where the other framework has no limit."""


def put_model(names: Names, name: str) -> str:
    """Sets the model to the path that the script sets `name` to, and returns it."""
    path = (names.text(name) or "MODEL").rstrip("/")
    names.draft.put("model.path", path, names.shown(name))
    if re.fullmatch(r"MODEL|[\w.-]+/[\w.-]+", path) and not Path(path).exists():
        names.draft.supply["model.path"] = f"the directory to which you download {path}"
    return path


def put_ranks(draft: Draft, trainers: int, engines: int, per_node: int, source: str) -> None:
    """Sets the number of trainer ranks, and the nodes for these and for `engines`, the GPUs of engines that do not
    share the trainers' GPUs."""
    put = draft.put
    nodes = math.ceil((trainers + engines) / per_node)
    put("cluster.device", "cuda", "add `gpu: h100`, h200 or gb300 for a plan of the memory")
    put("cluster.nodes", nodes, f"GPUs of trainers: {trainers}, more of engines: {engines}; {source}")
    if per_node != NODE:
        put("cluster.gpus_per_node", per_node, source)
    if nodes > 1:
        put("cluster.ray_address", "auto", "several nodes are a running Ray cluster")
    put("trainer.world_size", trainers, source)


def put_engines(draft: Draft, gpus: int, per_engine: int, per_node: int, source: str, stages: int) -> None:
    """Sets the number and the size of the engines. `gpus`: GPUs of all engines. `per_engine`: GPUs of one. `stages`:
    its pipeline stages."""
    put = draft.put
    put("rollout.engines.0.count", max(1, gpus // per_engine), source)
    put("rollout.engines.0.tensor", per_engine, source)
    if stages > 1:
        draft.left[f"{stages} pipeline stages of an engine"] = "all GPUs of an engine are tensor parallel ranks"
    if per_engine > per_node:
        put("rollout.engines.0.nodes", math.ceil(per_engine / per_node), f"{per_engine} of {per_node} GPUs per node")
        put("cluster.trusted_network", True, "engines over several nodes run what their addresses send them")


def put_transport(draft: Draft) -> None:
    """Sets how weights reach the engines: from GPU to GPU on one machine."""
    if draft.get("rollout.engines") == []:
        return
    if draft.get("schedule.colocate"):
        one = draft.get("cluster.nodes") == 1
        draft.put("publish.transport", "cuda_ipc" if one else "nixl", "trainers and engines share GPUs")
    draft.put("publish.staging", "bucket", "engines pause while weights arrive, as in the other framework")


def put_updates(draft: Draft, updates: float, source: str) -> None:
    """Sets the number of updates per step, if it is a whole number of groups."""
    if updates >= 1 and updates == int(updates):
        draft.put("schedule.updates_per_step", int(updates), source)
    else:
        draft.left[source] = f"a step would have {updates:g} updates; choose batch sizes that divide each other"


def put_steps(names: Names, total: str, epochs: str, default: float, updates: float = 1) -> None:
    """Sets the number of steps: that in `total`, a number of updates, or else that of as many `epochs`, which needs the
    number of prompts. `default`: epochs without either. `updates`: updates of the other framework per step."""
    draft = names.draft
    limit, passes = names.number_or(0, total), names.number_or(default, epochs)
    batch = draft.count("rollout.prompts_per_step")
    prompts = draft.get("rollout.prompts")
    rows = rows_of(prompts) if isinstance(prompts, str) else None
    if limit > 0:
        source = names.shown(total) + f" / {updates:g} updates" * (updates > 1)
        draft.put("schedule.steps", max(1, int(limit / updates)), source)
    elif rows is None:
        draft.put("schedule.steps", 100, f"{names.shown(epochs)} {passes:g}")
        draft.supply["schedule.steps"] = (
            f"number of prompts * {passes:g} / {batch}; {prompts or 'the file of prompts'} is not here to be counted"
        )
    else:
        steps = max(1, rows // batch)  # of a pass; what is left is dropped
        draft.put(
            "schedule.steps", max(1, int(passes * steps)), f"{rows} prompts / {batch}, rounded down, x {passes:g}"
        )


def put_kl(names: Names, section: str, weight: float, kind: str) -> None:
    """Sets the KL term of the loss. With a weight of 0 the reference only logs the KL, and the estimator has no effect.
    `section`: start of the names of the term. `weight`, `kind`: the other framework's defaults."""
    draft = names.draft
    put = draft.put
    switch, coef, estimator = (f"{section}{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    weight = names.number_or(weight, coef)
    if not names.has(switch):
        note_unneeded(names, "without " + names.shown(switch) + " it has no effect", coef, estimator)
        return
    put("algorithm.reference", True, names.shown(switch))
    if not weight:
        note_unneeded(names, "a weight of 0 leaves the term off; the KL is logged", coef, estimator)
        return
    put("algorithm.kl_coef", whole(weight), names.shown(coef))
    shown = names.shown(estimator)
    translated = kl_kind(names, estimator, kind)
    put("algorithm.kl_estimator", translated, shown)
    if translated == "k1" and not draft.get("algorithm.kl_unbiased"):
        draft.left[shown + " k1"] = (
            "this estimator in the loss has a gradient of mean 0, so slimx refuses it; k2 is set, whose gradient is "
            "that of the KL"
        )
        put("algorithm.kl_estimator", "k2", "instead of k1")


def kl_kind(names: Names, name: str, default: str) -> str:
    """Returns slimx's estimator of the KL for the one that the script sets `name` to."""
    kind = names.text(name) or default
    return KL_KINDS.get(kind, kind)


def put_family(draft: Draft, spec: str) -> None:
    """Sets what engines need for models with delta nets or state-space layers, by the name of the model. `spec`: other
    text that names the family."""
    if not _RECURRENT.search(f"{draft.get('model.path')} {spec}") or draft.get("rollout.engines") == []:
        return
    options = "rollout.engines.0.sglang"
    draft.put(options + ".disable_radix_cache", True, "reuse of such layers' states was never tested")
    speculative = [key for key in draft.settings if key.startswith(options + ".speculative_")]
    for key in speculative:
        draft.left[key.removeprefix(options + ".")] = (
            "speculative decoding was never tested with such layers; without it, engines sample the same tokens"
        )
        draft.remove(key)


def put_mtp(draft: Draft, layers: int, scale: float | None, source: str) -> None:
    """Sets training of `layers` layers of multi-token prediction. `scale`: weight of their loss; None: the default."""
    if _NO_MTP.search(str(draft.get("model.path"))):
        draft.left[source] = "slimx keeps this family's layer of multi-token prediction as it is"
        return
    draft.put("trainer.megatron.mtp_num_layers", layers, source)
    if scale is not None:
        draft.put("trainer.megatron.mtp_loss_scaling_factor", scale, source)


def longest_rollout(draft: Draft) -> int:
    """Returns the tokens of the longest rollout, including the prompt."""
    keys = ("rollout.max_prompt_tokens", "rollout.sampling.max_new_tokens")
    return sum(draft.count(key) for key in keys)


def put_tokens(draft: Draft, tokens: float, source: str) -> None:
    """Sets the tokens of a micro-batch: `tokens`, or the longest rollout where that is longer."""
    longest = longest_rollout(draft)
    if longest > tokens:
        source = f"the longest rollout; {source} is less, {tokens:g}"
    draft.put("trainer.max_tokens_per_microbatch", int(max(tokens, longest)), source)


def put_warmup(draft: Draft, owner: str, share: float, name: str) -> None:
    """Sets the steps of warm-up of `owner`, trainer or critic, to a `share` of all updates."""
    key = owner + ".optimizer.warmup_steps"
    updates = draft.count("schedule.steps", 1) * draft.count("schedule.updates_per_step", 1)
    draft.put(key, int(share * updates), f"{share:g} of all updates ({name})")
    if "schedule.steps" in draft.supply:
        draft.supply[key] = f"{share:g} of all updates"


def put_balance(names: Names, section: str, default: str) -> None:
    """Sets the loss that balances experts. `section`: start of Megatron-LM's names in the script. `default`: kind of
    the loss where the script names none."""
    coef, kind = section + "moe_aux_loss_coeff", section + "moe_router_load_balancing_type"
    value = names.number(coef)
    chosen = names.text(kind) or ("none" if names.words(kind) else default)
    if value and chosen != "none":
        names.draft.put("trainer.moe.aux_loss_coef", value, names.shown(coef))
        names.draft.put("trainer.moe.aux_loss_type", chosen, names.shown(kind))
    else:
        note_unneeded(names, "without a coefficient and a kind of loss nothing is balanced", coef, kind)


def put_discounts(names: Names, gamma: str, lam: str) -> None:
    """Sets the discounts of rewards per token to those in `gamma` and `lam`; most algorithms have none."""
    kind = names.draft.get("algorithm.name")
    for key, name, kinds in (
        ("gamma", gamma, ("ppo", "reinforce_pp", "reinforce_pp_baseline")),
        ("lam", lam, ("ppo",)),
    ):
        if kind in kinds:
            put_number(names, "algorithm.advantages." + key, name, 1.0)
        else:
            note_unneeded(names, f"{kind} has no such discount", name)


def put_lora(names: Names, rank: str, alpha: str, usual: tuple[int, int]) -> None:
    """Sets adapters of the rank that the script sets `rank` to; none for 0. `usual`: rank and alpha by default."""
    size, scale = names.count(rank, usual[0]), whole(names.number_or(usual[1], alpha))
    if size:
        source = names.shown(rank) + ", " + names.shown(alpha)
        names.draft.put("trainer.lora", {"rank": size, "alpha": scale}, source)


def put_teacher(draft: Draft, index: int, model: str, source: str) -> str:
    """Adds a frozen group of engines that serves the teacher, and returns the start of its keys. `index`: the number of
    other groups."""
    group = f"rollout.engines.{index}"
    for key, value in {"name": "teacher", "frozen": True, "model": model, "count": 1}.items():
        draft.put(group + "." + key, value, source)
    draft.put("algorithm.teacher_engine", "teacher", source)
    return group


def put_answers(draft: Draft, hook: str, source: str) -> None:
    """Sets what training on given answers has instead of rollouts. `hook`: name of the hook that reads them."""
    put = draft.put
    put("rollout.generate", hook, source)
    put("rollout.engines", [], "nothing is sampled")
    put("rollout.group_size", 1, "an answer per prompt")
    put("reward.function", None, "the data set has the answers")


def algorithm_of(draft: Draft, estimator: str, source: str) -> str:
    """Returns slimx's algorithm with an advantage `estimator` of another framework; grpo, with a note, if there is
    none."""
    found = ALGORITHMS.get(estimator, estimator)
    if isinstance(found, str):
        return found
    draft.left[source + " " + estimator] = found.note
    return "grpo"


def layers_of(path: str) -> int | None:
    """Returns the number of layers in config.json of the model's directory `path`; None if it is not here."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
    except ValueError:  # a plan names the mistake
        return None
    layers = (content.get("text_config") or content).get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def put_stages(
    draft: Draft, layers: float | None, first: float | None, last: float | None, stages: int, source: str
) -> None:
    """Sets the layers of every pipeline stage if the first or the last has another number than the others. `layers`:
    layers of the model; None if the script does not say."""
    if first is None and last is None:
        return
    if layers is None:
        draft.left[source] = (
            "set trainer.layers_per_stage: the model's number of layers is in config.json, which is not at model.path"
        )
        return
    middle = stages - (first is not None) - (last is not None)
    counts = [(layers - (first or 0) - (last or 0)) // max(1, middle)] * middle
    if first is not None:
        counts = [first, *counts]
    if last is not None:
        counts = [*counts, last]
    draft.put("trainer.layers_per_stage", [int(count) for count in counts], source)
