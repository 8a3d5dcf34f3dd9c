"""A plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.filesize import decimal

from slimx.extras.planner.links.model import Stages
from slimx.extras.planner.memory.phases import PHASES
from slimx.extras.planner.memory_record import DiskBytes, EngineMemory, Held, HostMemory, TrainerMemory
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
"""Columns of the memory table behind the rank, and their widths."""


def describe(report: PlanReport) -> list[str]:
    """The report as lines of text; violations, warnings and suggestions aside."""
    lines = [
        f"model       {report.architecture}, {report.model}: {_count(report.parameters, 1)} parameters in "
        f"{report.checkpoint_tensors:,} tensors",
        f"trainer     {report.trainer.world} ranks: {_trainer(report.trainer)}; the fullest holds "
        f"{_count(report.largest_rank, 2)} parameters",
    ]
    if report.critic is not None:
        where = f"{report.critic.world} ranks of its own" if report.critic_own else "in the trainer's ranks"
        lines.append(
            f"critic      {where}: {_trainer(report.critic)}; the fullest holds "
            f"{_count(report.critic_largest_rank, 2)} more parameters"
        )
    lines += [f"engines     {_engines(group)}" for group in report.engines]
    lines += [f"frozen      {_engines(group)}" for group in report.frozen]
    lines += _places(report.rank_map)
    lines += [f"kernels     {sentence}" for sentence in report.kernels]
    lines += _batch(report.batch)
    lines += _memory(report)
    if (figures := report.publication) is None:
        why = f"the run lacks {report.nodes_lacking} nodes" if report.engines else "the run has no engines"
        return [*lines, f"publication none: {why}"]
    lines += _publication(figures, report.device)
    for link in report.links:
        seconds = f", predicted {link.seconds:.2f} s at the link's rate" if link.seconds is not None else ""
        lines.append(f"  links     {link.link}: {_size(link.nbytes)}, {_size(link.busiest)} by the busiest{seconds}")
    return lines


def _places(places: RankMap) -> Iterator[str]:
    yield f"places      {places.gpus} GPUs on {places.nodes} nodes of {places.per_node}, filled in the order of ranks"
    for name, ranks in (("trainer", places.trainer), ("critic", places.critic)):
        for stage in sorted({rank.pipeline for rank in ranks}):
            yield f"  {name:9s} {_stage([rank for rank in ranks if rank.pipeline == stage])}"
    for name, servers in (("engines", places.engines), ("frozen", places.frozen)):
        for group in dict.fromkeys(place.group for place in servers):
            last = {gpu // places.per_node for place in servers if place.group == group for gpu in place.gpus}
            yield f"  {name:9s} {group}: nodes {_range(sorted(last))}"


def _stage(ranks: list[RankPlace]) -> str:
    first = ranks[0]
    layers = f"layers {_range(first.layers)}" if first.layers else "no layers"
    held = sorted({rank.experts for rank in ranks if rank.experts})
    experts = ""
    if len(held) > 1:
        experts = f", experts {', '.join(f'{a}-{b}' for a, b in held[:3])}{', ...' if len(held) > 3 else ''} by EP rank"
    elif held:
        experts = f", all {held[0][1] + 1} experts"
    nodes = _range(sorted({rank.node for rank in ranks}))
    return f"stage {first.pipeline}: ranks {first.rank}-{ranks[-1].rank}, nodes {nodes}, {layers}{experts}"


def _range(numbers: tuple[int, ...] | list[int]) -> str:
    """Such as 0-3, 8-11."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _batch(batch: BatchPlan) -> Iterator[str]:
    yield (
        f"batch       {batch.prompts_per_step} prompts x {batch.group_size} = {batch.rollouts_per_step} rollouts a "
        f"step, updates a step: {batch.updates_per_step}, each of {batch.rollouts_per_update} rollouts; "
        f"{batch.requests_in_flight} requests in flight at most"
    )
    yield (
        f"  update    {batch.rollouts_per_data_rank} rollouts per data-parallel rank in "
        f"{batch.microbatches_per_update} micro-batches of {batch.tokens_per_microbatch:,} tokens, if all have the "
        f"greatest length of {batch.tokens_per_rollout:,}; pipeline stages wait {batch.bubble:.0%} of it"
    )


def _memory(report: PlanReport) -> Iterator[str]:
    of = f" of {_gib(report.gpu_memory)} ({report.gpu or 'cluster.gpu_memory_gib'})" if report.gpu_memory else ""
    yield f"memory      GiB per GPU{of}; activations estimated, overhead assumed, the rest exact"
    yield f"            rank{_cells(COLUMNS)}"
    for record in report.trainer_memory:
        on_top = max(record.head, record.work) + record.communication + record.copies
        sizes = (record.weights, record.gradients, record.optimizer, record.activations, on_top)
        sizes += (record.overhead + record.dispatcher, record.peak)
        cells = _cells([*map(_gib, sizes), str(record.in_flight), _gib(record.host)])
        yield f"  {record.model:8s}{record.rank:6d}{cells}"
    if report.trainer_memory:
        yield from _parts(max(report.trainer_memory, key=lambda record: record.peak), report.host_bandwidth)
    for record in report.engine_memory:
        yield from _engine_memory(record)
    yield from _phases(report)
    yield from _beside(report.host, report.disk)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, COLUMNS.values(), strict=True))


def _beside(host: HostMemory | None, disk: DiskBytes | None) -> Iterator[str]:
    """Lines on a node's host memory and on the disk."""
    if host is not None:
        of = f" of {_gib(host.memory)}" if host.memory else ""
        yield f"  host      GiB of a node with {host.ranks} trainer ranks: {_gib(host.nbytes)}{of}: {_held(host.held)}"
    if disk is not None:
        yield (
            f"  disk      {_size(disk.nbytes)} at most: {disk.checkpoints} checkpoints of {_size(disk.checkpoint)}, "
            f"{disk.exports} exports of {_size(disk.export)}, rollouts {_size(disk.rollouts)}"
        )


def describe_together(sums: Together) -> list[str]:
    """The sums over all policies as lines of text."""
    fullest = f", the fullest takes {_gib(sums.fullest)} GiB" if sums.fullest is not None else ""
    return [
        f"together    {sums.gpus} GPUs on {sums.nodes} nodes of {sums.per_node}, policy after policy{fullest}",
        *_beside(sums.host, sums.disk),
    ]


def _parts(record: TrainerMemory, bandwidth: float | None) -> Iterator[str]:
    """Lines on what recomputing or offloading parts of layers takes off the fullest rank, and what it costs."""
    again = [f"{name} {_gib(n)}" for name, n in record.parts.items() if not name.startswith("offload ")]
    away = [f"{name.split()[1]} {_gib(n)}" for name, n in record.parts.items() if name.startswith("offload ")]
    ways = [f"{way} {', '.join(parts)}" for way, parts in (("computed again", again), ("on the host", away)) if parts]
    if ways:
        yield f"  parts     of the activations of {record.model} rank {record.rank}: {'; '.join(ways)}"
    if record.moved:
        took = f", {record.moved / bandwidth:.2f} s each way" if bandwidth else ""
        yield (
            f"  host      activations of an update to the host and back: {_size(record.moved)}{took}, beside the "
            f"passes; {_gib(record.host_activations)} GiB of pinned memory a rank"
        )


def _phases(report: PlanReport) -> Iterator[str]:
    """A table of GPUs by phases, and what the fullest holds."""
    if not report.phases:
        return
    names = dict.fromkeys((each.gpu, each.group) for each in report.phases)
    peaks = {(each.gpu, each.group, each.phase): each.nbytes for each in report.phases}
    yield "  phases              " + "".join(f"{phase:>9}" for phase in PHASES)
    for gpu, group in dict.fromkeys((gpu, "" if gpu == "shared" else group) for gpu, group in names):
        cells = []
        for phase in PHASES:
            found = [n for (kind, of, when), n in peaks.items() if (kind, when) == (gpu, phase) and group in ("", of)]
            cells.append(f"{_gib(max(found)) if found else '-':>9}")
        yield f"    {group or gpu:18s}" + "".join(cells)
    fullest = max(report.phases, key=lambda each: each.nbytes)
    yield f"            fullest: {fullest.phase} of {fullest.group or fullest.gpu}: {_held(fullest.held[:4])}"


def _held(held: Sequence[Held]) -> str:
    return ", ".join(f"{each.what} {_gib(each.nbytes)}" for each in held)


def _engine_memory(record: EngineMemory) -> Iterator[str]:
    states = f", {_size(record.state_per_request)} of states per request" if record.state_per_request else ""
    yield (
        f"  {record.group}: weights {_gib(record.weights)} a rank, {_size(record.kv_per_token)} of KV cache per token"
        + states
        + (f", DeepEP's buffers {_gib(record.dispatcher)} beside them" if record.dispatcher else "")
        + (
            f", {_gib(record.static)} for {'all' if states else 'both'} (mem_fraction_static {record.static_fraction})"
            if record.static is not None
            else ""
        )
    )
    if record.kv_tokens is not None:
        yield (
            f"            {record.kv_tokens:,} tokens fit: {record.concurrency} rollouts of the greatest length at "
            f"once in a server, {record.concurrency * record.count} in all"
        )


def _publication(figures: PublicationFigures, device: str) -> Iterator[str]:
    yield f"publication encoding {figures.encoding}: {figures.note} (engines on {device})"
    yield f"  transport {figures.transport}: {figures.transport_note}"
    quantised = f"{figures.quantised:,} by the rule {figures.rule}" if figures.quantised else "none"
    yield f"  tensors   {figures.tensors:,} to each engine, quantised: {quantised}"
    yield (
        f"  bytes     {_size(figures.nbytes)} in all; an engine rank takes {_size(figures.received)}, a trainer rank "
        f"sends {_size(figures.sent_max)} at most, {_size(figures.sent_mean)} on average"
    )
    if figures.adapter_bytes:
        yield (
            f"  adapters  {_size(figures.adapter_bytes)} in all at each version, to engines that hold the base, which "
            "comes with the first (publish.adapters)"
        )
    yield f"  work      {figures.buckets:,} buckets, {figures.launches:,} kernel launches per trainer rank at most"
    if figures.merging_bytes:
        yield (
            f"  merging   {_size(figures.merging_bytes)} of a trainer rank's memory at most, where the weights of a "
            "bucket meet their adapters (trainer.lora)"
        )
    if figures.transport == "nixl" and not figures.on_gpus:
        yield (
            f"  memory    {_size(figures.publisher_bytes)} of the host for buckets of a trainer rank at most, "
            f"{_size(figures.landing_bytes)} beside each engine on each of its machines (publish.transport nixl)"
        )
        if figures.kept_bytes:
            yield (
                f"  changes   {_size(figures.kept_bytes)} of the host more for what a trainer rank sent last at most, "
                f"{_size(figures.held_bytes)} more beside each engine (publish.delta)"
            )
    else:
        where = "of each trainer rank's GPU" if figures.on_gpus else "of the host beside trainer rank 0"
        yield (
            f"  memory    {_size(figures.publisher_bytes)} {where} for buckets, "
            f"{_size(figures.staged_bytes)} of an engine rank's GPU at most (publish.transport {figures.transport})"
        )
        if figures.kept_bytes:
            yield (
                f"  changes   {_size(figures.kept_bytes)} of the host more beside trainer rank 0, "
                f"{_size(figures.held_bytes + figures.landing_bytes)} beside each engine (publish.delta)"
            )
    yield (
        f"  plan      {figures.moves:,} moves, {_size(figures.plan_bytes)}, compiled in "
        f"{figures.compile_seconds:.1f} s; "
        "proven: every element of every tensor is written once"
    )


def describe_predictions(predicted: Predicted) -> list[str]:
    """The predictions as lines of text, if the model is right about this machine."""
    off = f"the model is off by {predicted.model_off_here:+.0%} here"
    if not predicted.shown:
        return [f"predicted   not shown: {off}"]
    lines = [f"predicted   by the link model, not measured; {off}"]
    for one in predicted.publications or ():
        lines.append(f"  {one.links}: {_stages(one.stages) if one.stages else one.refusal}")
    return [
        *lines,
        "  if every trainer rank writes to every engine rank, from device to device, as the run deals the bytes out",
    ]


def describe_suggestions(report: PlanReport) -> list[str]:
    """Layouts that fit, as lines of text."""
    lines = []
    if (nearest := report.nearest) is not None:
        lines += [
            f"nearest     that fits: {nearest.layout}; peak {_gib(nearest.trainer_peak)} GiB, margin "
            f"{_gib(nearest.margin)}",
            f"            {' '.join(nearest.overrides)}",
        ]
    elif report.refits and report.gpu and not report.suggestions:
        lines.append(f"nearest     none: no layout of up to 64 times as many ranks fits{_searched(report)}")
    elif report.searched is not None and not report.searched.complete and not report.suggestions:
        lines.append(f"suggested   none{_searched(report)}")
    if report.suggestions:
        lines.append("suggested   layouts that fit, cheapest first; seconds of an update predicted, for ranking only")
    for number, one in enumerate(report.suggestions, 1):
        lines.append(
            f"  {number}. {one.layout}: {one.cost:.2f} s ({one.why}); peak {_gib(one.trainer_peak)} GiB, margin "
            f"{_gib(one.margin)}"
        )
        lines.append(f"     {' '.join(one.overrides) or 'as configured'}")
    for engine in report.suggested_engines:
        lines.append(
            f"  engines   {engine.group}: count {engine.count}, tensor {engine.tensor}, expert {engine.expert}, "
            f"dp_attention {engine.dp_attention}, nodes {engine.nodes}: {engine.concurrency} rollouts of the greatest "
            f"length at once, weights {_gib(engine.weights)} GiB a rank"
        )
    return lines


def _searched(report: PlanReport) -> str:
    """Words on the extent of a search that ended at its limit; "" for any other."""
    if (searched := report.searched) is None or searched.complete:
        return ""
    return f", of the {searched.tried} most promising that were tried of {searched.layouts:,}"


def _stages(stages: Stages) -> str:
    return (
        f"{stages.total:.2f} s (gather and pack {stages.pack:.2f}, transfer {stages.transfer:.2f}, verify "
        f"{stages.check + stages.verify:.2f}, load {stages.load:.2f}, calls {stages.control:.2f}; packing overlaps "
        "with transfer)"
    )


def _trainer(sizes: Sizes) -> str:
    return (
        f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x data {sizes.data}, expert {sizes.expert} x expert tensor "
        f"{sizes.expert_tensor}"
    )


def _engines(group: PlannedGroup) -> str:
    role = "" if group.role == "regular" else f" ({group.role})"
    where = " that run already" if group.external else f" over {group.nodes} nodes each" if group.nodes > 1 else ""
    where += ", counted with the policy that starts them" if group.borrowed else ""
    return f"{group.name}{role}: {group.count} x {group.sizes.world} ranks{where}: {_engine(group.sizes)}"


def _engine(sizes: EngineSizes) -> str:
    dp = f", attention in {sizes.attention_data} copies" if sizes.attention_data > 1 else ""
    redundant = f", {sizes.redundant} redundant experts" if sizes.redundant else ""
    return f"tensor {sizes.tensor} x pipeline {sizes.pipeline}, expert {sizes.expert}{dp}{redundant}"


def _count(number: int, digits: int) -> str:
    return f"{number / 1e9:.{digits}f} B" if number >= 1e8 else f"{number / 1e6:.{digits}f} M"


def _size(nbytes: float) -> str:
    return decimal(round(nbytes), precision=2)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}" if abs(nbytes) >= GIB / 10 else f"{nbytes / GIB:.3f}"
