"""The report of `slimx plan` as lines of text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich.filesize import decimal

from slimx.errors import counted, duration
from slimx.extras.planner.links.model import Stages
from slimx.extras.planner.memory.phases import PHASES
from slimx.extras.planner.memory_record import DiskBytes, EngineMemory, HostMemory, MemoryPart, Phase, TrainerMemory
from slimx.extras.planner.record import (
    BatchPlan,
    PlannedGroup,
    PlanReport,
    Predicted,
    PublicationFigures,
    RankMap,
    RankPlace,
    Together,
)
from slimx.layout.ranks import EngineSizes, Sizes

GIB = 2**30
COLUMNS = {
    "weights": 9,
    "grads": 7,
    "optimizer": 11,
    "activations": 13,
    "on top": 8,
    "overhead": 10,
    "peak": 8,
    "in flight": 11,
    "host": 8,
}
"""Columns of the memory table that follow the rank's column, and their widths in characters."""


def describe(report: PlanReport) -> list[str]:
    """Returns the lines of the report, without violations, warnings and suggestions. `report` must be complete."""
    assert report.trainer is not None and report.rank_map is not None and report.batch is not None
    lines = [
        f"model       {report.architecture}, {report.model}: {_count(report.parameters, 1)} parameters in "
        f"{counted(report.checkpoint_tensors, 'tensor')}",
        f"trainer     {counted(report.trainer.world, 'rank')}: {_trainer(report.trainer)}; the fullest holds "
        f"{_count(report.largest_rank, 2)} parameters",
    ]
    if report.critic is not None:
        ranks = counted(report.critic.world, "separate rank") if report.separate_critic else "in the trainer's ranks"
        lines.append(
            f"critic      {ranks}: {_trainer(report.critic)}; the fullest holds "
            f"{_count(report.critic_largest_rank, 2)} more parameters"
        )
    lines += [f"engines     {_engines(group)}" for group in report.engines]
    lines += [f"frozen      {_engines(group)}" for group in report.frozen]
    lines += _places(report.rank_map, report.device)
    lines += [f"kernels     {sentence}" for sentence in report.kernels]
    lines += [*_batch(report.batch), *(f"  load      {load.text}" for load in [report.rollout_load] if load)]
    lines += _memory(report)
    if report.publication is None:
        why = f"the run lacks {counted(report.nodes_lacking, 'node')}" if report.engines else "the run has no engines"
        return [*lines, f"publication none: {why}"]
    lines += _publication(report.publication, report.device)
    for link in report.links:
        line = f"  links     {link.link}: {_size(link.nbytes)}, {_size(link.busiest)} by the busiest"
        if link.seconds is not None:
            line += f", predicted {duration(link.seconds)} at the link's rate"
        lines.append(line)
    return lines


def _places(places: RankMap, device: str) -> Iterator[str]:
    if device == "cpu":
        yield f"places      {places.gpus} process{'es' * (places.gpus > 1)} on CPUs"
    else:
        nodes = f"{counted(places.nodes, 'node')} of {places.per_node}, filled in the order of ranks"
        yield f"places      {counted(places.gpus, 'GPU')} on {nodes}"
    for name, ranks in (("trainer", places.trainer), ("critic", places.critic)):
        stages: dict[int, list[RankPlace]] = {}
        for rank in ranks:
            stages.setdefault(rank.pipeline, []).append(rank)
        for _, members in sorted(stages.items()):
            yield f"  {name:9s} {_stage(members)}"
    for name, servers in (("engines", places.engines), ("frozen", places.frozen)):
        used: dict[str, set[int]] = {}
        for server in servers:
            used.setdefault(server.group, set()).update(gpu // places.per_node for gpu in server.gpus)
        for group, indices in used.items():
            yield f"  {name:9s} {group}: {_numbered('node', sorted(indices))}"


def _stage(ranks: list[RankPlace]) -> str:
    first = ranks[0]
    layers = _numbered("layer", first.layers) if first.layers else "no layers"
    ranges = sorted({rank.experts for rank in ranks if rank.experts})
    experts = ""
    if len(ranges) > 1:
        listed = ", ".join(f"{a}-{b}" for a, b in ranges[:3])
        if len(ranges) > 3:
            listed += ", ..."
        experts = f", experts {listed} by EP rank"
    elif ranges:
        experts = f", all {counted(ranges[0][1] + 1, 'expert')}"
    nodes = _numbered("node", sorted({rank.node for rank in ranks}))
    numbers = _numbered("rank", range(first.rank, ranks[-1].rank + 1))
    return f"stage {first.pipeline}: {numbers}, {nodes}, {layers}{experts}"


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    """Formats sorted numbers as ranges after their noun, such as "ranks 0-3, 8-11" or "rank 0"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{noun}{'s' * (len(numbers) != 1)} {listed}"


def _batch(batch: BatchPlan) -> Iterator[str]:
    yield (
        f"batch       {counted(batch.prompts_per_step, 'prompt')} x {batch.group_size} = "
        f"{counted(batch.rollouts_per_step, 'rollout')} a step, {counted(batch.updates_per_step, 'update')} a step, "
        f"each with {batch.rollouts_per_update}; at most {counted(batch.requests_in_flight, 'request')} in flight"
    )
    yield (
        f"  update    {counted(batch.rollouts_per_data_rank, 'rollout')} per data-parallel rank in "
        f"{batch.microbatches_per_update} micro-batch{'es' * (batch.microbatches_per_update != 1)} of "
        f"{batch.tokens_per_microbatch:,} tokens, if all have the maximum length of {batch.longest}; pipeline stages "
        f"wait {batch.bubble:.0%} of it"
    )


def _memory(report: PlanReport) -> Iterator[str]:
    gpu = f" of {_gib(report.gpu_memory)} ({report.gpu or 'cluster.gpu_memory_gib'})" if report.gpu_memory else ""
    yield f"memory      GiB per GPU{gpu}; activations estimated, overhead assumed, the rest exact"
    yield f"            rank{_cells(COLUMNS)}"
    for record in report.trainer_memory:
        sizes = [
            record.weights,
            record.gradients,
            record.optimizer,
            record.activations,
            max(record.head, record.work) + record.communication + record.copies,
            record.overhead + record.dispatcher,
            record.peak,
        ]
        cells = _cells([*map(_gib, sizes), str(record.in_flight), _gib(record.host)])
        yield f"  {record.model:8s}{record.rank:6d}{cells}"
    if report.trainer_memory:
        yield from _parts(max(report.trainer_memory, key=lambda record: record.peak), report.host_bandwidth)
    for engine in report.engine_memory:
        yield from _engine_memory(engine)
    yield from _phases(report)
    yield from _host_and_disk(report.host, report.disk)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, COLUMNS.values(), strict=True))


def _host_and_disk(host: HostMemory | None, disk: DiskBytes | None) -> Iterator[str]:
    """Yields the lines about the host memory of a node and about disk space."""
    if host is not None:
        memory = f" of {_gib(host.memory)}" if host.memory else ""
        ranks = counted(host.ranks, "trainer rank")
        yield f"  host      GiB of a node with {ranks}: {_gib(host.nbytes)}{memory}: {_memory_parts(host.parts)}"
    if disk is not None:
        exports = f"{counted(disk.exports, 'export')} of {_size(disk.export)}, rollouts {_size(disk.rollouts)}"
        checkpoints = f"{counted(disk.checkpoints, 'checkpoint')} of {_size(disk.checkpoint)}"
        yield f"  disk      at most {_size(disk.nbytes)}: {checkpoints}, {exports}"


def describe_together(sums: Together) -> list[str]:
    """Returns the lines about the GPUs, the host memory and the disk space of all policies together."""
    nodes = f"{counted(sums.nodes, 'node')} of {sums.per_node}"
    line = f"together    {counted(sums.gpus, 'GPU')} on {nodes}, one policy after the other"
    if sums.fullest is not None:
        line += f", {_gib(sums.fullest)} GiB on the fullest"
    return [line, *_host_and_disk(sums.host, sums.disk)]


def _parts(record: TrainerMemory, bandwidth: float | None) -> Iterator[str]:
    """Yields the lines about the memory that recomputing or offloading parts of layers saves on the fullest rank
    `record`, and about its cost. `bandwidth`: bytes per second between GPU and host."""
    recomputed: list[str] = []
    offloaded: list[str] = []
    for name, nbytes in record.parts.items():
        if name.startswith("offload "):
            offloaded.append(f"{name.removeprefix('offload ')} {_gib(nbytes)}")
        else:
            recomputed.append(f"{name} {_gib(nbytes)}")
    savings = []
    if recomputed:
        savings.append(f"computed again {', '.join(recomputed)}")
    if offloaded:
        savings.append(f"on the host {', '.join(offloaded)}")
    if savings:
        yield f"  parts     of the activations of {record.model} rank {record.rank}: {'; '.join(savings)}"
    if record.moved:
        line = f"  host      activations of an update to the host and back: {_size(record.moved)}"
        if bandwidth:
            line += f", {duration(record.moved / bandwidth)} per direction"
        yield f"{line}, during the passes; {_gib(record.host_activations)} GiB of pinned memory a rank"


def _phases(report: PlanReport) -> Iterator[str]:
    """Yields the lines of the table of GPU memory by phase, then a line about the largest parts on the fullest GPU."""
    if not report.phases:
        return
    peaks: dict[str, dict[Phase, int]] = {}
    for peak in report.phases:
        row = peaks.setdefault("shared" if peak.gpu == "shared" else peak.group or peak.gpu, {})
        row[peak.phase] = max(row.get(peak.phase, 0), peak.nbytes)
    yield "  phases              " + "".join(f"{phase:>9}" for phase in PHASES)
    for name, row in peaks.items():
        cells = [_gib(row[phase]) if phase in row else "-" for phase in PHASES]
        yield f"    {name:18s}" + "".join(f"{cell:>9}" for cell in cells)
    fullest = max(report.phases, key=lambda peak: peak.nbytes)
    yield f"            fullest: {fullest.phase} of {fullest.group or fullest.gpu}: {_memory_parts(fullest.parts[:4])}"


def _memory_parts(parts: Sequence[MemoryPart]) -> str:
    return ", ".join(f"{part.name} {_gib(part.nbytes)}" for part in parts)


def _engine_memory(record: EngineMemory) -> Iterator[str]:
    line = (
        f"  {record.group}: weights {_gib(record.weights)} per rank, {_size(record.kv_per_token)} of KV cache per token"
    )
    kinds = "both"
    if record.state_per_request:
        line += f", {_size(record.state_per_request)} of states per request"
        kinds = "all"
    if record.dispatcher:
        line += f", DeepEP's buffers {_gib(record.dispatcher)} in addition"
    if record.static is not None:
        line += f", {_gib(record.static)} for {kinds} (mem_fraction_static {record.static_fraction})"
    yield line
    if record.kv_tokens is not None and record.concurrency is not None:
        yield (
            f"            {record.kv_tokens:,} tokens fit: {counted(record.concurrency, 'rollout')} of the maximum "
            f"length at a time per server, {record.concurrency * record.count} in total"
        )


def _publication(figures: PublicationFigures, device: str) -> Iterator[str]:
    yield f"publication encoding {figures.encoding}: {figures.note} (engines on {device})"
    yield f"  transport {figures.transport}: {figures.transport_note}"
    quantized = f"{figures.quantized:,} by the rule {figures.rule}" if figures.quantized else "none"
    yield f"  tensors   {figures.tensors:,} to each engine, of them quantized: {quantized}"
    yield (
        f"  bytes     {_size(figures.nbytes)} in total; an engine rank receives {_size(figures.received)}, a trainer "
        f"rank sends at most {_size(figures.sent_max)}, on average {_size(figures.sent_mean)}"
    )
    if figures.adapter_bytes:
        yield (
            f"  adapters  {_size(figures.adapter_bytes)} in total per version; the base weights are sent only in the "
            "first publication (publish.adapters)"
        )
    launches = f"{figures.launches:,} kernel launch{'es' * (figures.launches != 1)}"
    yield f"  work      {counted(figures.buckets, 'bucket')}, at most {launches} per trainer rank"
    if figures.merging_bytes:
        yield (
            f"  merging   {_size(figures.merging_bytes)} of memory on the fullest trainer rank, to merge the weights "
            "of a bucket with their adapters (trainer.lora)"
        )
    if figures.transport == "nixl" and not figures.on_gpus:
        yield (
            f"  memory    at most {_size(figures.publisher_bytes)} of host memory for a trainer rank's buckets, "
            f"{_size(figures.landing_bytes)} per engine on each of its machines (publish.transport nixl)"
        )
        if figures.kept_bytes:
            yield (
                f"  changes   at most {_size(figures.kept_bytes)} more host memory for the weights that a trainer rank "
                f"sent last, {_size(figures.received_bytes)} more per engine (publish.delta)"
            )
    else:
        memory = "of each trainer rank's GPU" if figures.on_gpus else "of trainer rank 0's host"
        yield (
            f"  memory    {_size(figures.publisher_bytes)} {memory} for buckets, "
            f"at most {_size(figures.staged_bytes + figures.registered_bytes)} of an engine rank's GPU "
            f"(publish.transport {figures.transport})"
        )
        if figures.registered_bytes:
            yield f"            of the latter {_size(figures.registered_bytes)} in all phases: registered once per run"
        if figures.kept_bytes:
            yield (
                f"  changes   {_size(figures.kept_bytes)} more of trainer rank 0's host, "
                f"{_size(figures.received_bytes + figures.landing_bytes)} per engine (publish.delta)"
            )
    yield (
        f"  plan      {counted(figures.moves, 'move')}, {_size(figures.plan_bytes)}, compiled in "
        f"{duration(figures.compile_seconds)}; proven: every element of every tensor is written exactly once"
    )


def describe_predictions(predicted: Predicted, *, on_gpus: bool) -> list[str]:
    """Returns the lines about the predictions, or one line if the link model is inaccurate for this machine."""
    off = f"the prediction deviates by {predicted.model_off_here:+.0%} on this machine"
    if not predicted.shown:
        return [f"predicted   not shown: {off}"]
    lines = [f"predicted   by the link model, not measured; {off}"]
    for prediction in predicted.publications or ():
        lines.append(f"  {prediction.links}: {_stages(prediction.stages) if prediction.stages else prediction.refusal}")
    like = "as in" if on_gpus else "but through host memory in"
    return [*lines, f"  from device to device, {like} this run; bytes divided among trainer ranks as in the run"]


def describe_suggestions(report: PlanReport) -> list[str]:
    """Returns the lines that list the suggested layouts and server sizes."""
    lines = []
    nearest = report.nearest
    if nearest is not None:
        lines += [
            f"nearest     layout that fits: {nearest.layout}; peak {_gib(nearest.trainer_peak)} GiB, margin "
            f"{_gib(nearest.margin)}",
            f"            {shlex.join(nearest.overrides)}",
        ]
    elif report.refits and report.gpu and not report.suggestions:
        lines.append(f"nearest     none: no layout of up to 64 times as many ranks fits{_searched(report)}")
    elif report.searched is not None and not report.searched.complete and not report.suggestions:
        lines.append(f"suggested   none{_searched(report)}")
    if report.suggestions:
        lines.append("suggested   layouts that fit, cheapest first; seconds of an update predicted, for ranking only")
    for number, suggestion in enumerate(report.suggestions, 1):
        lines.append(
            f"  {number}. {suggestion.layout}: {suggestion.cost:.2f} s ({suggestion.why}); peak "
            f"{_gib(suggestion.trainer_peak)} GiB, margin {_gib(suggestion.margin)}"
        )
        lines.append(f"     {shlex.join(suggestion.overrides) or 'as configured'}")
    for engine in report.suggested_engines:
        sizes = f"count {engine.count}, tensor {engine.tensor}, expert {engine.expert}"
        sizes += f", dp_attention {engine.dp_attention}, nodes {engine.nodes}"
        fits = f"{counted(engine.concurrency, 'rollout')} of the maximum length at a time"
        lines.append(f"  engines   {engine.group}: {sizes}: {fits}, weights {_gib(engine.weights)} GiB per rank")
    return lines


def _searched(report: PlanReport) -> str:
    """Returns a clause that says how far a search went before it stopped at its limit; "" for a complete search."""
    searched = report.searched
    if searched is None or searched.complete:
        return ""
    return f" among the {searched.tried} most promising of {searched.layouts:,}"


def _stages(stages: Stages) -> str:
    return (
        f"{duration(stages.total)} (gather and pack {duration(stages.pack)}, transfer {duration(stages.transfer)}, "
        f"verify {duration(stages.check + stages.verify)}, load {duration(stages.load)}, calls "
        f"{duration(stages.control)}; packing overlaps with transfer)"
    )


def _trainer(sizes: Sizes) -> str:
    return (
        f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x data {sizes.data}, expert {sizes.expert} x expert tensor "
        f"{sizes.expert_tensor}"
    )


def _engines(group: PlannedGroup) -> str:
    role = "" if group.role == "regular" else f" ({group.role})"
    suffix = ""
    if group.external:
        suffix = ", started elsewhere"
    elif group.nodes > 1:
        suffix = f" over {group.nodes} nodes each"
    if group.borrowed:
        suffix += ", counted with the policy that starts them"
    return f"{group.name}{role}: {group.count} x {counted(group.sizes.world, 'rank')}{suffix}: {_engine(group.sizes)}"


def _engine(sizes: EngineSizes) -> str:
    text = f"tensor {sizes.tensor} x pipeline {sizes.pipeline}, expert {sizes.expert}"
    if sizes.attention_data > 1:
        text += f", {sizes.attention_data} data-parallel copies of the attention"
    if sizes.redundant:
        text += f", {counted(sizes.redundant, 'redundant expert')}"
    return text


def _count(number: int, digits: int) -> str:
    if number >= 1e8:
        return f"{number / 1e9:.{digits}f} B"
    return f"{number / 1e6:.{digits}f} M"


def _size(nbytes: float) -> str:
    return decimal(round(nbytes), precision=2)


def _gib(nbytes: float) -> str:
    if abs(nbytes) >= GIB / 10:
        return f"{nbytes / GIB:.1f}"
    return f"{nbytes / GIB:.3f}"
