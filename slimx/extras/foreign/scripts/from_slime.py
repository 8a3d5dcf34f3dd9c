"""Configuration from a launch command of slime or Miles (train.py, train_async.py)."""

from __future__ import annotations

from pathlib import Path

from slimx.extras.foreign.megatron import MEGATRON
from slimx.extras.foreign.scripts.draft import Draft, scalar
from slimx.extras.foreign.scripts.names import Names, whole
from slimx.extras.foreign.scripts.shared import (
    NODE,
    PROMPT_TOKENS,
    longest_rollout,
    put_balance,
    put_engines,
    put_family,
    put_lora,
    put_model,
    put_mtp,
    put_ranks,
    put_stages,
    put_steps,
    put_tokens,
    put_transport,
    put_updates,
    put_warmup,
)
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of
from slimx.extras.foreign.scripts.slime_algorithm import put_algorithm, put_demonstrations, put_evaluation
from slimx.extras.foreign.scripts.translate import note_unneeded, put_count, put_number, translate_rest
from slimx.extras.foreign.slime import SLIME

PROGRAMS = ("train.py", "train_async.py")
_FULLY_ASYNC = "fully_async"
_SFT = "sft_rollout"
_SHORT = {
    "sglang_expert_parallel_size": "sglang_ep_size",
    "sglang_data_parallel_size": "sglang_dp_size",
    "sglang_pipeline_parallel_size": "sglang_pp_size",
}
"""Short names of SGLang's options by the long ones."""


def read_slime(launch: Launch, draft: Draft) -> None:
    """Adds what `launch` means to `draft`. Raises SlimxError for a flag whose value is not known or no number."""
    values = {_SHORT.get(name, name): words for name, words in flags_of(launch.arguments).items()}
    flags = Names(draft, values, lambda name: f"--{name.replace('_', '-')}")
    sft = (flags.text("loss_type") == "sft_loss") or _SFT in (flags.text("rollout_function_path") or "")
    if launch.broken:
        draft.left["the launch command"] = "a backslash is missing at the end of one of its lines; all flags are read"
    asynchronous = launch.program == "train_async.py"
    _model(flags, draft)
    _prompts(flags, draft, sft=sft)
    _sampling(flags, draft, sft=sft)
    _ranks(flags, draft, sft=sft, asynchronous=asynchronous)
    _batches(flags, draft)
    _trainer(flags, draft)
    _optimizer(flags, draft)
    if sft:
        put_demonstrations(flags, draft)
    else:
        put_algorithm(flags, draft)
        put_evaluation(flags, draft)
    translate_rest(flags, (SLIME, MEGATRON))
    if draft.get("algorithm.name") == "ppo":  # the critic has the arguments of the actor
        for key in [*draft.settings]:
            inherited = key.replace("trainer", "critic", 1)
            if key.startswith("trainer.optimizer.") and inherited not in draft.settings:
                draft.put(inherited, draft.get(key), draft.sources[key])
    put_family(draft, " ".join(flags.values.get("spec", [])))
    put_transport(draft)


def _model(flags: Names, draft: Draft) -> None:
    path = put_model(flags, "hf_checkpoint")
    name = Path(path).name
    save = flags.text("save")
    draft.put("run.name", Path(save).name if save else name, "")
    draft.put("run.dir", save.rstrip("/") if save else "runs/" + name, "--save" if save else "the script saves nothing")
    load = flags.text("load")
    reference = flags.text("ref_load")
    if load is not None and load == save:
        draft.unneeded["--load"] = "a run resumes from its own checkpoints in run.dir"
    elif load is not None and load != reference:
        draft.left[f"--load {load}"] = (
            "set trainer.load to this directory if it has the initial weights; a run resumes from its checkpoints in "
            "run.dir"
        )
    note_unneeded(flags, "the run starts from model.path, and the reference has these weights", "ref_load")
    if "FP8" in name or "INT4" in name:
        _quantized(draft, path, name)


def _quantized(draft: Draft, path: str, name: str) -> None:
    """Sets up engines that load the quantized copy at `path`, while trainers start from the checkpoint that it was made
    from."""
    put = draft.put
    for ending in ("-FP8", "-fp8", "-INT4", "-int4"):
        name = name.removesuffix(ending)
    put("model.path", str(Path(path).parent / name), "the checkpoint from which the quantized one was made")
    draft.supply["model.path"] = "the checkpoint in bfloat16, with which trainers start"
    put("rollout.engines.0.model", path, "--hf-checkpoint, which the engines load")
    if "FP8" in path:
        put("publish.quantize", "triton", "engines in fp8; docs/numerics.md has other rules")
    else:
        put("publish.quantize", "int4", "engines in INT4, in groups of 32 columns")
        put("rollout.engines.0.sglang.moe_runner_backend", "triton", "the expert kernels that INT4 needs")
        put("trainer.qat", "int4", "training rounds as the engines do")


def _prompts(flags: Names, draft: Draft, *, sft: bool) -> None:
    put = draft.put
    prompts = flags.text("prompt_data")
    if prompts is None:
        put("rollout.prompts", "PROMPTS", "")
        draft.supply["rollout.prompts"] = "file of prompts"
    else:
        put("rollout.prompts", prompts.partition("@")[0], "--prompt-data")
        if "@" in prompts:
            draft.left["--prompt-data " + prompts] = "a file is read as a whole; write the rows to a file of their own"
    put("rollout.fields.prompt", flags.text("input_key") or "input", "--input-key")
    for name, key in (("label_key", "answer"), ("tool_key", "tools")):
        value = flags.text(name)
        if value is not None:
            put("rollout.fields." + key, value, flags.shown(name))
    metadata = flags.text("metadata_key")
    if metadata is not None:
        put("rollout.fields.metadata", [metadata], "--metadata-key")
    images = flags.text("multimodal_keys")
    if images is not None:
        columns = scalar(images)
        column = columns.get("image") if isinstance(columns, dict) else None
        put("rollout.fields.images", str(column or images), "--multimodal-keys")
        put("trainer.vision", {"train": "none"}, "--multimodal-keys")
    seed = flags.number("rollout_seed", "seed")
    if seed is not None:
        put("run.seed", int(seed), "--rollout-seed, or --seed")
    if "apply_chat_template" not in flags.values and not sft:
        draft.left["no --apply-chat-template"] = (
            "slimx always applies the chat template to messages; give rows with token_ids to apply none"
        )


def _sampling(flags: Names, draft: Draft, *, sft: bool) -> None:
    put = draft.put
    longest = flags.count("rollout_max_response_len", 1024)
    limit = flags.number("rollout_max_prompt_len")
    context = flags.number("rollout_max_context_len")
    if limit is not None:
        put("rollout.max_prompt_tokens", int(limit), "--rollout-max-prompt-len")
    elif context is not None and context > longest:
        put("rollout.max_prompt_tokens", int(context) - longest, "--rollout-max-context-len less the answer")
    else:
        put("rollout.max_prompt_tokens", PROMPT_TOKENS, "slime has no limit; raise it for longer prompts")
    if sft:
        return
    if context is not None:
        draft.left[f"--rollout-max-context-len {context:g}"] = (
            "rollout.max_prompt_tokens limits prompts and rollout.sampling.max_new_tokens every turn, nothing their sum"
        )
    put("rollout.sampling.max_new_tokens", longest, "--rollout-max-response-len")
    ids = flags.listed("rollout_stop_token_ids")
    if ids:
        put("rollout.sampling.stop_token_ids", [scalar(word) for word in ids], "--rollout-stop-token-ids")


def _ranks(flags: Names, draft: Draft, *, sft: bool, asynchronous: bool) -> None:
    put = draft.put
    per_node = flags.count("num_gpus_per_node", NODE)
    trainers = flags.count("actor_num_nodes", 1) * flags.count("actor_num_gpus_per_node", NODE)
    colocate = flags.has("colocate")
    generates = not (sft or flags.has("debug_train_only"))
    gpus = flags.count("rollout_num_gpus", trainers if colocate else per_node)
    if colocate and gpus > trainers:
        draft.left[f"--rollout-num-gpus {gpus}"] = "with --colocate, engines run on the trainers' GPUs only"
        gpus = trainers
    elif generates and gpus == 0:
        draft.supply["rollout.engines"] = (
            "--rollout-num-gpus 0 starts no engine; list the urls of running SGLang servers"
        )
    put_ranks(
        draft,
        trainers,
        0 if colocate or not generates else gpus,
        per_node,
        "--actor-num-nodes x --actor-num-gpus-per-node",
    )
    if not generates:
        return
    per_engine = flags.count("rollout_num_gpus_per_engine", 1)
    put_engines(
        draft,
        gpus,
        per_engine,
        per_node,
        "--rollout-num-gpus / --rollout-num-gpus-per-engine",
        flags.count("sglang_pp_size", 1),
    )
    if flags.number("rollout_num_gpus") is None and not colocate:
        draft.supply["rollout.engines.0.count"] = "the script gives no --rollout-num-gpus; one node is assumed"
    if flags.number("sglang_ep_size") is not None:
        put("rollout.engines.0.expert", flags.count("sglang_ep_size", 1), "--sglang-ep-size")
    copies = flags.count("sglang_dp_size", 1)
    if flags.has("sglang_enable_dp_attention"):
        put("rollout.engines.0.dp_attention", copies, "--sglang-dp-size with --sglang-enable-dp-attention")
    elif copies > 1:
        draft.left[f"--sglang-dp-size {copies}"] = "without DP-attention, more copies are a larger count of engines"
    requests = flags.number("sglang_server_concurrency")
    if requests is not None:
        servers = max(1, gpus // per_engine)
        put("rollout.concurrency", int(requests) * servers, f"--sglang-server-concurrency x {servers} engines")
    prefill = flags.count("prefill_num_servers", 0)
    if prefill and colocate:
        draft.left[f"--prefill-num-servers {prefill}"] = (
            "prefill and decode servers cannot share GPUs with trainers; all engines do both"
        )
    elif prefill:
        _disaggregated(draft, prefill)
    if colocate:
        put("schedule.colocate", True, "--colocate")
    elif asynchronous:
        far = _FULLY_ASYNC in (flags.text("rollout_function_path") or "")
        interval = flags.count("update_weights_interval", 1)
        put("schedule.max_staleness", max(interval, 2 if far else 1), "the program train_async.py")
        if far:
            draft.unneeded["--rollout-function-path"] = "schedule.max_staleness above 1 generates without a break"
            draft.supply["schedule.max_staleness"] = "slime's fully asynchronous rollout has no limit; 2 is assumed"


def _disaggregated(draft: Draft, prefill: int) -> None:
    """Divides the engines into `prefill` servers that read prompts and the others, which sample."""
    group = {key.removeprefix("rollout.engines.0."): value for key, value in draft.settings.items() if ".0." in key}
    count = group.pop("count")
    for index, (role, number) in enumerate((("prefill", prefill), ("decode", int(str(count)) - prefill))):
        source = "--prefill-num-servers"
        for key, value in {"name": role, "role": role, "count": number, **group}.items():
            draft.put(f"rollout.engines.{index}.{key}", value, source)
    draft.put("rollout.routed_experts", False, "decode servers do not know the experts of the prompt's tokens")


def _batches(flags: Names, draft: Draft) -> None:
    put = draft.put
    prompts = put_count(flags, "rollout.prompts_per_step", "rollout_batch_size", 32)
    samples = put_count(flags, "rollout.group_size", "n_samples_per_prompt", 1)
    updates = flags.number("num_steps_per_rollout")
    batch = flags.number("global_batch_size")
    if updates is not None:
        put("schedule.updates_per_step", int(updates), "--num-steps-per-rollout")
    elif batch is not None:
        source = f"--global-batch-size {batch:g}: {prompts} x {samples} / {batch:g}"
        put_updates(draft, prompts * samples / batch, source)
    put_steps(flags, "num_rollout", "num_epoch", 1)
    sampled = flags.number("over_sampling_batch_size")
    if sampled is not None and sampled > prompts:
        put("rollout.over_sampling", whole(sampled / prompts), "--over-sampling-batch-size / --rollout-batch-size")
    if flags.has("partial_rollout"):
        put("rollout.partial", True, "--partial-rollout")
        put("schedule.max_staleness", max(1, draft.count("schedule.max_staleness")), "--partial-rollout")


def _trainer(flags: Names, draft: Draft) -> None:
    put = draft.put
    context = put_count(flags, "trainer.context", "context_parallel_size", 1)
    tokens = flags.number("max_tokens_per_gpu")
    sequences = flags.count("micro_batch_size", 1)
    if tokens is None:
        length = flags.count("seq_length", longest_rollout(draft))
        put_tokens(draft, sequences * length, "--micro-batch-size x --seq-length, or the longest rollout")
    else:
        put_tokens(draft, tokens * context, "--max-tokens-per-gpu x --context-parallel-size")
    stages = put_count(flags, "trainer.pipeline", "pipeline_model_parallel_size", 1)
    layers = flags.number("num_layers")
    first, last = (flags.number("decoder_" + end + "_pipeline_num_layers") for end in ("first", "last"))
    put_stages(draft, layers, first, last, stages, "--decoder-first/last-pipeline-num-layers")
    chunk = flags.number("num_layers_per_virtual_pipeline_stage")
    if chunk is not None and layers is not None:
        put("trainer.virtual_pipeline", int(layers / stages / chunk), "--num-layers-per-virtual-pipeline-stage")
    if put_count(flags, "trainer.expert", "expert_model_parallel_size", 1) == 1:
        note_unneeded(flags, "it needs trainer.expert above 1", "expert_tensor_parallel_size")
    modules = flags.listed("recompute_modules")
    if modules:
        put("trainer.recompute.modules", modules, "--recompute-modules")
    put_balance(flags, "", "aux_loss")
    put_lora(flags, "lora_rank", "lora_alpha", (0, 16))
    if flags.has("enable_mtp_training"):
        scale = flags.number("mtp_loss_scaling_factor")
        put_mtp(draft, flags.count("mtp_num_layers", 1), scale, "--enable-mtp-training")
    else:
        note_unneeded(flags, "it needs --enable-mtp-training", "mtp_loss_scaling_factor")
    if flags.has("deterministic_mode"):
        put("trainer.megatron.deterministic_mode", True, "--deterministic-mode")
    if flags.has("fp8_format") or flags.has("fp8_recipe"):
        recipe = flags.text("fp8_recipe") or "blockwise"
        put("trainer.fp8", "mxfp8" if recipe == "mxfp8" else "blockwise", "--fp8-recipe")
        if draft.get("publish.quantize"):
            put("publish.quantize", "te", "engines round as trainers with --fp8-recipe do")
    bucket = flags.number("update_weight_buffer_size")
    if bucket is not None:
        put("publish.bucket_mib", max(1, int(bucket) >> 20), "--update-weight-buffer-size in MiB")


def _optimizer(flags: Names, draft: Draft) -> None:
    put = draft.put
    put_number(flags, "trainer.optimizer.lr", "lr", 1e-6)
    put("trainer.optimizer.decay", "linear", "--lr-decay-style")
    put_number(flags, "trainer.optimizer.weight_decay", "weight_decay", 0.01)
    betas = [flags.number_or(0.9, "adam_beta1"), flags.number_or(0.999, "adam_beta2")]
    put("trainer.optimizer.betas", betas, "--adam-beta1, --adam-beta2")
    warmup = flags.number("lr_warmup_fraction")
    if warmup is not None:
        put_warmup(draft, "trainer", warmup, "--lr-warmup-fraction")
    if flags.has("optimizer_cpu_offload"):
        fraction = flags.number_or(1.0, "optimizer_offload_fraction")
        put("trainer.optimizer.offload_fraction", fraction, "--optimizer-cpu-offload")
