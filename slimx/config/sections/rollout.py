"""Section `rollout`: generation of training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from slimx.config.section import (
    LARGEST,
    Amount,
    Count,
    Faults,
    Options,
    PathText,
    Positive,
    Seconds,
    Section,
    Share,
    Size,
    TopP,
    Weight,
)
from slimx.config.sections.engines import Engines, Health, group_faults

if TYPE_CHECKING:
    from slimx.config.sections.general import Schedule

MAX_SUPPORT = 4096
"""Maximum number of candidates per token that SGLang reports with top-k or top-p (sampling_mask_max_tokens)."""
GREEDY = 1e-6
"""Temperature below which SGLang samples greedily (`_SAMPLING_EPS`). Also the value of top_p up to which only one token
remains, for any vocabulary of fewer than a million tokens."""

ROUTED_PER_STEP = 4
"""Minimum number of rollouts per step that return routed experts if only metrics use them."""

RENDERED = {"conversation", "messages", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict"}
"""Arguments that slimx passes to a chat template, which `rollout.template` therefore must not set."""


class RowFields(Section):
    """Names of the columns of prompt files. A dotted name selects a nested value, such as reward_model.ground_truth."""

    prompt: str
    """Column with the question: a string, which becomes a single user turn, or a list of messages."""
    answer: str | None = None
    """Column with the answer; numbers are converted to text. null: rows have no answer."""
    answer_after: str | None = None
    """Marker in the answer column, such as '####' in GSM8K: the answer is the text after its last occurrence. A row
    without the marker is an error. null: the whole column."""
    id: str | None = None
    """Column with an id that is unique in the file. Rows without an id, or all rows if this is null, are identified by
    the file's name without extension and the row's index."""
    dataset: str | None = None
    """Column with the data set's name, used by metrics and `reward.parts`; null: the source's name, if it has one."""
    rejected: str | None = None
    """Column with the rejected answer, for preference learning; null: none."""
    tools: str | None = None
    """Column with the tools that the chat template renders, as a list or as JSON text; null: no tools."""
    images: str | None = None
    """Column with images: shown to the model with `trainer.vision`, else only to hooks, unchanged; null: none."""
    metadata: tuple[str, ...] = ()
    """Additional columns to copy into the prompt's metadata."""


class PromptSet(Section):
    """One of several sources of prompts (`rollout.sources`)."""

    path: PathText
    """File of prompts, directory of such files, or hf://OWNER/NAME."""
    name: str
    """Name of the source in metrics, and default value of metadata.dataset for its prompts."""
    weight: Weight | dict[Count, Weight] = 1.0
    """Weight of the source relative to the other sources: the prompts of a batch are sampled from sources by weight. A
    mapping from steps to weights changes the weight at these steps; before its first step the weight is 0."""
    subset: str | None = None
    """Configuration (subset) to load from a data set that has several; null: the data set has only one."""
    split: str | None = None
    """Split to load from a data set that has several; null: the data set has only one."""
    fields: RowFields | None = None
    """Columns of this source's rows; null: `rollout.fields`."""

    def weight_at(self, step: int) -> float:
        """Returns the weight of this source in the batch of `step`, counted from 0."""
        if not isinstance(self.weight, dict):
            return self.weight
        return next((self.weight[start] for start in sorted(self.weight, reverse=True) if start <= step), 0.0)


def source_faults(sources: tuple[PromptSet, ...]) -> Faults:
    """Yields a fault for a source name that occurs twice, and for a step at which all weights are 0."""
    names = [source.name for source in sources]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        yield (
            "sources.name",
            repeated[0],
            f"rollout.sources has two sources named {repeated[0]!r}; give each source a unique name",
        )
    if not sources:
        return
    starts = {0}
    for source in sources:
        if isinstance(source.weight, dict):
            starts |= source.weight.keys()
    for step in sorted(starts):
        if not any(source.weight_at(step) for source in sources):
            yield (
                "sources.weight",
                "rollout.sources",
                f"rollout.sources: all weights are 0 at step {step}; give at least one source a positive weight",
            )
            return


class Sampling(Section):
    temperature: Weight = 1.0
    """Softmax temperature; 0: greedy sampling."""
    top_p: TopP = Field(
        default=1.0,
        description=f"Probability mass for nucleus sampling, from at most {MAX_SUPPORT} candidates; 1: all tokens.",
    )
    top_k: int = Field(
        default=-1,
        ge=-1,
        le=LARGEST,
        description=f"Number of most likely tokens to sample from, at most {MAX_SUPPORT}; -1: all tokens.",
    )
    max_new_tokens: Amount = 1024
    """Maximum number of tokens sampled per turn; longer responses are truncated."""
    stop_token_ids: tuple[Count, ...] = ()
    """Token ids that end a turn, in addition to the model's end-of-sequence tokens."""

    @property
    def greedy(self) -> dict[str, float]:
        """Settings, by key, that make sampling greedy (all responses to a prompt are equal); {} if it is not greedy."""
        keys: dict[str, float] = {}
        if self.temperature < GREEDY:
            keys["temperature"] = self.temperature
        if self.top_k == 1:
            keys["top_k"] = self.top_k
        if self.top_p <= GREEDY:
            keys["top_p"] = self.top_p
        return keys

    def _faults(self) -> Faults:
        if self.top_k == 0:
            yield (
                "sampling.top_k",
                "rollout.sampling.top_k",
                "rollout.sampling.top_k is 0, so no token could be sampled; set -1 for all tokens or a positive number",
            )
        if self.top_k > MAX_SUPPORT:
            yield (
                "sampling.top_k",
                "rollout.sampling.top_k",
                f"rollout.sampling.top_k is {self.top_k}, but engines report at most {MAX_SUPPORT} candidates per "
                "token, and the trainer needs all of them; lower it, or set -1 for all tokens",
            )


class Proxy(Section):
    host: str = "127.0.0.1"
    """Address at which agents connect to this run. Traffic is not encrypted; beyond loopback, use a trusted network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port at which agents connect; 0: any free port."""

    def _faults(self) -> Faults:
        if self.host in ("0.0.0.0", "::", ""):
            yield (
                "proxy.host",
                "rollout.proxy.host",
                f"rollout.proxy.host is {self.host!r}, which agents cannot connect to; set an address of the driver's "
                "machine",
            )


def _worker_count(value: object) -> object:
    if value != "auto" and not (type(value) is int and 0 < value <= 65_536):
        raise ValueError("write the number of workers, at most 65,536, or auto")
    return value


WorkerCount = Annotated[Size | Literal["auto"], BeforeValidator(_worker_count)]


class WorkerResources(Section):
    """Needs of a rollout worker."""

    cpus: Positive = 1.0
    """CPU cores that Ray reserves for each worker."""
    gpus: Weight = 0.0
    """GPUs that Ray reserves for each worker, for hooks that compute on them."""
    memory: Positive | None = None
    """Memory in GiB that Ray reserves for each worker. A worker that uses more is restarted. null: no limit."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which workers run, by key, as Ray's option --labels sets them; empty: any node."""


class Rollout(Section):
    prompts: PathText | None = None
    """File of prompts (JSONL, JSON, CSV, TSV, parquet, Arrow), directory of such files, or hf://OWNER/NAME
    (docs/data.md); null: `sources` are used."""
    sources: tuple[PromptSet, ...] = ()
    """Prompt sources to use instead of `prompts`; every batch mixes them by their weights."""
    fields: RowFields | None = None
    """Columns of rows that are not in slimx's format; null: all rows are in that format."""
    map: str | None = None
    """Dotted path of a hook `to_prompt(row)` to use instead of `fields`; it returns a dict with id, messages or
    token_ids, answer, metadata, tools and template. null: none."""
    system: str | None = None
    """Text of the system turn that is added to prompts without one; null: none is added."""
    template: Options = Field(default_factory=dict)
    """Additional arguments for the chat template, such as {enable_thinking: false}; a prompt's `template` overrides
    them."""
    source: str | None = None
    """Dotted path of a hook `source(prompts, seed) -> DataSource`, which orders the prompts; null: shuffled epochs."""
    prompts_per_step: Amount = 32
    """Number of prompts, and therefore of groups, that each step trains on."""
    over_sampling: float | None = Field(default=None, ge=1, le=1_000_000)
    """Number of groups in flight while a step waits for its groups, as a multiple of prompts_per_step, rounded up.
    null: max_staleness + 1 - window, the most that training can use before they are too stale. Groups that become too
    stale are generated again."""
    partial: bool = False
    """Pause the engines while trainers run (partial rollouts). Unfinished rollouts are interrupted, keep their tokens,
    and continue in the next step. Requires a positive schedule.max_staleness."""
    group_size: Amount = 8
    """Number of rollouts per prompt, which form a group."""
    generate: str = "single_turn"
    """Hook that produces a prompt's rollouts: the name of a built-in hook (docs/hooks.md), or a dotted path."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the `generate` hook."""
    filter: str | None = None
    """Dotted path of a hook `keep(group) -> bool | reason`, which filters groups; null: all groups are kept."""
    replay: PathText | None = None
    """Directory of another run to replay: its saved rollouts (`track.rollouts`) are trained on step by step, no engine
    is started, and nothing is generated. null: generate rollouts."""
    engines: tuple[Engines, ...] = (Engines(),)
    """Groups of engine servers; empty for training that generates nothing (SFT)."""
    sampling: Sampling = Sampling()
    proxy: Proxy = Proxy()
    max_prompt_tokens: Amount = 1024
    """Maximum length of a prompt in tokens. A longer prompt is reported as an error before the run starts."""
    concurrency: Amount = 256
    """Maximum number of requests to the engines that are in flight at once, over all rollouts."""
    max_rollouts: Amount = 4096
    """Maximum number of rollouts in flight at once, including those that wait for tools."""
    affinity: Literal["prefix", "group", "rollout"] = "prefix"
    """Requests that are routed to the same engine. prefix: those with a long common prefix, unless the engine has far
    more load than the others; group: all of a prompt's rollouts; rollout: all of one rollout."""
    request_deadline: Seconds = 600
    """Seconds within which an engine must complete one request."""
    request_retries: Count = 2
    """Maximum number of times that a request is sent again because its engine was lost."""
    rollout_deadline: Seconds = 1800
    """Seconds within which a rollout must finish, not counting its waits for `concurrency` and for paused engines, and
    an async `filter` must return."""
    interrupt_deadline: Seconds = 30
    """Seconds within which interrupted requests must return their tokens: between steps if `partial` is true, and
    before a run is saved on a signal. Slower requests are sent again, without the tokens of the interrupted attempt."""
    max_failed_share: Share = 0.1
    """Maximum fraction of a step's groups that may fail; the run stops with an error if more do."""
    routed_experts: bool = True
    """Return the experts that each token was routed to (MoE): for every rollout if they are replayed or saved;
    otherwise for four to seven rollouts per step, to measure how often trainer and engine route differently."""
    gap_probe: Count = 4
    """Number of rollouts that an engine scores again to measure its log-prob gap to the trainers, if all tokens of a
    step were sampled with older weight versions; rounded up to one per data-parallel rank. 0: none."""
    health: Health = Health()
    workers: WorkerCount = "auto"
    """Number of processes that generate rollouts, with hooks, tools, agents' servers and rewards. 1: the driver alone.
    More: Ray actors, spread over the nodes. auto: 1 without cluster.ray_address, else as many as the run needs."""
    worker_resources: WorkerResources = WorkerResources()
    worker_deadline: Seconds = 120
    """Seconds for which a rollout worker may be blocked, for example by a hook that calls time.sleep. Later it is
    restarted, and its unfinished rollouts continue."""

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a single-turn rollout, including the prompt."""
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def sampled(self) -> bool:
        """True if engines sampled the rollouts that are trained on, in this run or in the replayed one."""
        return any(not group.frozen for group in self.engines)

    @property
    def disaggregated(self) -> bool:
        """True if prefill and decode run on separate servers (SGLang's disaggregation)."""
        return any(group.role != "regular" for group in self.engines)

    def _faults(self) -> Faults:
        if self.prompts is None and not self.sources:
            yield (
                "config.missing_key",
                "rollout.prompts",
                "rollout.prompts is missing; set it in the file or with rollout.prompts=VALUE, or set rollout.sources",
            )
        if self.prompts is not None and self.sources:
            yield (
                "sources.both",
                "rollout.prompts",
                "rollout.prompts and rollout.sources are both set; make rollout.prompts one of the sources",
            )
        if self.map is not None and (self.fields is not None or any(source.fields for source in self.sources)):
            yield (
                "prompts.map",
                "rollout.map",
                "rollout.map and fields are both set, but the hook of rollout.map returns the whole prompt; remove one "
                "of them",
            )
        if self.source is not None and self.sources:
            yield (
                "sources.source",
                "rollout.source",
                "rollout.source and rollout.sources are both set, but a source hook orders prompts itself and "
                "ignores weights; remove one of the two",
            )
        reserved = sorted(self.template.keys() & RENDERED)
        if reserved:
            yield (
                "template.argument",
                f"rollout.template.{reserved[0]}",
                f"rollout.template sets {reserved[0]!r}, an argument that slimx sets itself; remove it",
            )
        yield from source_faults(self.sources)
        yield from group_faults(self.engines)
        if self.disaggregated and self.routed_experts:
            yield (
                "rollout.routed_experts",
                "rollout.routed_experts",
                "rollout.routed_experts is true with prefill and decode groups, but the decode server that sends the "
                "response does not know the experts of the prompt's tokens; set rollout.routed_experts=false",
            )


def batches_in_flight(rollout: Rollout, schedule: Schedule) -> float:
    """Returns the number of groups in flight while a step waits for rollouts, as a multiple of
    `rollout.prompts_per_step`."""
    return rollout.over_sampling or float(max(1, schedule.max_staleness + 1 - schedule.window))
