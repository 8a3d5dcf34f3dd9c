"""Sections rollout and eval: generation of training data, and evaluation."""

from __future__ import annotations

from itertools import count, takewhile
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from slimx.config.section import (
    LARGEST,
    Amount,
    Count,
    Faults,
    Options,
    PathText,
    Real,
    Seconds,
    Section,
    Share,
    Weight,
)
from slimx.config.sections.engines import Engines, Health, group_faults

MAX_SUPPORT = 4096
"""Maximum number of candidates reported for a token under top-k or top-p (SGLang's sampling_mask_max_tokens)."""
GREEDY = 1e-6
"""Temperature below which SGLang takes the likeliest token (`_SAMPLING_EPS`). Also the nucleus mass up to which only
one token is kept, for any vocabulary of less than a million tokens."""

ROUTED_PER_STEP = 4
"""Minimum number of a step's rollouts that return experts if these are neither replayed nor saved."""

RENDERED = {"conversation", "messages", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict"}
"""Arguments of a chat template's rendering that slimx sets."""


class RowFields(Section):
    """Columns of a row; dotted for a nested value, such as reward_model.ground_truth."""

    prompt: str
    """Column of the question: a text, which becomes one user turn, or a list of messages."""
    answer: str | None = None
    """Column of the answer. Numbers are converted to text."""
    answer_after: str | None = None
    """Marker before the answer, such as '####' in GSM8K: the answer is the text after its last occurrence. A row
    without the marker is refused."""
    id: str | None = None
    """Column of an id that is unique in the file. A row without one, or every row if this is null, is identified by the
    file's stem and its index."""
    dataset: str | None = None
    """Column of the data set's name, for metrics and `reward.parts`."""
    rejected: str | None = None
    """Column of the rejected answer, for preference learning."""
    tools: str | None = None
    """Column of the tools for the chat template, as a list or as JSON."""
    images: str | None = None
    """Column of images, which hooks find unchanged in metadata.images."""
    metadata: tuple[str, ...] = ()
    """Columns copied to the prompt's metadata."""


class PromptSet(Section):
    """One of several sources."""

    path: PathText
    """File, directory or hf://OWNER/NAME."""
    name: str
    """Name of the source in metrics, and metadata.dataset of prompts whose row has none."""
    weight: Weight | dict[Count, Weight] = 1.0
    """Weight of the source relative to the other sources, or a mapping from steps to the weight from that step on.
    Before the first step of the mapping the weight is 0."""
    subset: str | None = None
    """Configuration (subset) of a data set that has several."""
    split: str | None = None
    """Split of a data set that has several."""
    fields: RowFields | None = None
    """Columns of this source; null: `rollout.fields`."""

    def weight_at(self, step: int) -> float:
        """Returns the weight in the batch of `step`, counted from 0."""
        if not isinstance(self.weight, dict):
            return self.weight
        return next((self.weight[start] for start in sorted(self.weight, reverse=True) if start <= step), 0.0)


def source_faults(sources: tuple[PromptSet, ...]) -> Faults:
    """Yields a fault for a name of two sources, and for a step at which all weights are 0."""
    names = [source.name for source in sources]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        yield (
            "sources.name",
            repeated[0],
            f"rollout.sources names {repeated[0]!r} twice; give each source its own name",
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
                f"rollout.sources: no source has a weight at step {step}; give one of them more than 0",
            )
            return


class Sampling(Section):
    temperature: Weight = 1.0
    """Softmax temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description=f"Nucleus mass to sample from, of at most {MAX_SUPPORT} candidates."
    )
    top_k: int = Field(
        default=-1,
        ge=-1,
        le=LARGEST,
        description=f"Number of candidates to sample from, at most {MAX_SUPPORT}; -1: all.",
    )
    max_new_tokens: Amount = 1024
    """Maximum number of tokens sampled per turn."""
    stop_token_ids: tuple[Count, ...] = ()
    """Token ids that end a turn, in addition to the model's eos."""

    @property
    def greedy(self) -> dict[str, float]:
        """The keys, with their values, that make all answers to a prompt the same; {}: answers differ."""
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
                "rollout.sampling.top_k is 0, which leaves no candidate; use -1 for all or a positive count",
            )
        if self.top_k > MAX_SUPPORT:
            yield (
                "sampling.top_k",
                "rollout.sampling.top_k",
                f"rollout.sampling.top_k is {self.top_k}, but engines report at most {MAX_SUPPORT} candidates per "
                "token, and the trainer needs all of them; lower it or use -1 for all",
            )


class Proxy(Section):
    host: str = "127.0.0.1"
    """Address at which agents reach the run. Traffic beyond loopback is not encrypted."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0: any free port."""

    def _faults(self) -> Faults:
        if self.host in ("0.0.0.0", "::", ""):
            yield (
                "proxy.host",
                "rollout.proxy.host",
                f"rollout.proxy.host is {self.host!r}, which agents cannot connect to; set an address of the driver's "
                "machine",
            )


class Rollout(Section):
    prompts: PathText | None = None
    """File of prompts (JSONL, JSON, CSV, TSV, parquet, Arrow), directory of such files, or hf://OWNER/NAME
    (docs/data.md)."""
    sources: tuple[PromptSet, ...] = ()
    """Several sources instead of `prompts`, each with a weight in every batch."""
    fields: RowFields | None = None
    """Columns of rows that are not in slimx's format; null: they are."""
    map: str | None = None
    """Dotted path of a hook instead of `fields`: to_prompt(row) -> dict with id, messages or token_ids, answer,
    metadata, tools, template."""
    system: str | None = None
    """System turn for prompts that have none."""
    template: Options = Field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking: false}. The `template` of a prompt takes precedence."""
    source: str | None = None
    """Dotted path of a hook for the order of prompts: source(prompts, seed) -> DataSource; null: shuffled epochs."""
    prompts_per_step: Amount = 32
    """Prompts (groups) trained per step."""
    over_sampling: float | None = Field(default=None, ge=1, le=1_000_000)
    """Groups in flight while a step waits for its groups, as a multiple of prompts_per_step, rounded up. null:
    max_staleness + 1 - window, the most that can be trained in time. Groups that become too stale are generated
    again."""
    partial: bool = False
    """Pause the engines while trainers train. Unfinished rollouts are interrupted, keep their tokens, and continue in
    the next step. It needs schedule.max_staleness."""
    group_size: Amount = 8
    """Rollouts per prompt."""
    generate: str = "single_turn"
    """Data-generation hook: the name of a built-in one (docs/hooks.md), or a dotted path."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of `generate`."""
    filter: str | None = None
    """Dotted path of the group filter: keep(group) -> bool | reason."""
    replay: PathText | None = None
    """Directory of a run whose saved rollouts (`track.rollouts`) are trained on again, step by step. No engine is
    started and nothing is generated."""
    engines: tuple[Engines, ...] = (Engines(),)
    """Groups of servers; empty: no generation (SFT)."""
    sampling: Sampling = Sampling()
    proxy: Proxy = Proxy()
    max_prompt_tokens: Amount = 1024
    """Maximum length of a prompt in tokens. Longer prompts are refused before the run starts."""
    concurrency: Amount = 256
    """Maximum number of rollouts' requests to the engines that are in flight at once."""
    max_rollouts: Amount = 4096
    """Maximum number of rollouts in flight, including those whose tools are running."""
    affinity: Literal["prefix", "group", "rollout"] = "prefix"
    """Requests that are sent to the same engine. prefix: those with a long common prefix, unless the engine is far
    busier than the others; group: all of a prompt's rollouts; rollout: all of one rollout."""
    request_deadline: Seconds = 600
    """Seconds for one request to an engine."""
    request_retries: Count = 2
    """Number of times that a request is sent again after its engine was lost."""
    rollout_deadline: Seconds = 1800
    """Seconds for one rollout, not counting its waits for `concurrency` and for paused engines."""
    interrupt_deadline: Seconds = 30
    """Seconds for interrupted requests to return with their tokens, between steps if `partial` is true, and before a
    run is saved on a signal. Requests that miss it are sent again and lose the tokens of the interrupted attempt."""
    max_failed_share: Share = 0.1
    """Fraction of a step's groups that may fail; the run stops if more do."""
    routed_experts: bool = True
    """Return tokens' experts with completions (MoE): of every rollout if they are replayed or saved, else of four to
    seven rollouts of a step, from which metrics show differing experts."""
    gap_probe: Count = 4
    """Number of rollouts (at least one per data-parallel rank) that an engine scores again, to measure its log-prob gap
    to the trainers, in a step whose tokens were all sampled by older weight versions; 0: none."""
    health: Health = Health()

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a rollout of one turn."""
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def served(self) -> tuple[Engines, ...]:
        """Groups that this run starts or connects to: none if rollouts are replayed."""
        return () if self.replay else self.engines

    @property
    def sampled(self) -> bool:
        """True if engines sampled the rollouts, in this run or in the replayed one."""
        return any(not group.frozen for group in self.engines)

    @property
    def policy_engines(self) -> tuple[Engines, ...]:
        """Groups that serve the policy: trainers publish to them, and rollouts sample from them."""
        return tuple(group for group in self.served if not group.frozen)

    @property
    def frozen_engines(self) -> tuple[Engines, ...]:
        """Groups that serve other models, which hooks call by name."""
        return tuple(group for group in self.served if group.frozen)

    @property
    def external_hosts(self) -> dict[str, str]:
        """Host of each external engine of the policy, which slimx does not start, by the engine's name."""
        hosts = {}
        for group in self.policy_engines:
            for index, url in enumerate(group.urls):
                hosts[f"{group.name}-{index}"] = urlsplit(url).hostname or ""
        return hosts

    @property
    def disaggregated(self) -> bool:
        """True if separate servers compute prompts and samples (prefill and decode)."""
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
                "rollout.prompts and rollout.sources are both set; make the file one of the sources",
            )
        if self.map is not None and (self.fields is not None or any(source.fields for source in self.sources)):
            yield (
                "prompts.map",
                "rollout.map",
                "rollout.map and fields are both set, but a mapping hook returns the whole prompt; leave one of them "
                "out",
            )
        if self.source is not None and self.sources:
            yield (
                "sources.source",
                "rollout.source",
                "rollout.source and rollout.sources are both set, but a source hook orders prompts itself and ignores "
                "weights; leave one of them out",
            )
        reserved = sorted(self.template.keys() & RENDERED)
        if reserved:
            yield (
                "template.argument",
                f"rollout.template.{reserved[0]}",
                f"rollout.template has {reserved[0]!r}, an argument that slimx sets; leave it out",
            )
        yield from source_faults(self.sources)
        yield from group_faults(self.engines)
        if self.disaggregated and self.routed_experts:
            yield (
                "rollout.routed_experts",
                "rollout.routed_experts",
                "rollout.routed_experts is true with prefill and decode groups, but the decode server, which sends the "
                "response, does not compute the experts of the prompt; set rollout.routed_experts=false",
            )


class Eval(Section):
    prompts: PathText | dict[str, PathText] | None = None
    """File of held-out prompts (as `rollout.prompts`), or a mapping from names to files; null: no evaluation. The name
    is metadata.dataset of prompts whose row has none, by which `reward.parts` can choose a reward for each file."""
    fields: RowFields | None = None
    """Columns of rows that are not in slimx's format. `rollout.fields` and `rollout.map` apply to training prompts
    only, `rollout.system` and `rollout.template` to both."""
    map: str | None = None
    """Dotted path of a hook instead of `fields`, as for `rollout.map`; it may be the same hook."""
    every: Count | None = None
    """Steps between evaluations; null: only before and after the run; 0: never."""
    samples: Amount = 1
    """Answers per prompt. eval/accuracy is their mean reward (avg@k); eval/pass@k is reported for k up to this."""
    pass_at: tuple[Amount, ...] = ()
    """Values of k for which eval/pass@k is reported, none above `samples`; empty: 2, 4, 8, ... up to it."""
    temperature: Weight = 0.0
    """Softmax temperature of the answers; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass to sample from if `temperature` is above 0."""
    passing: Real = 1.0
    """Minimum reward of a correct answer, in pass@k and in lengths by outcome."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for which pass@k is reported, ascending."""
        doubled = takewhile(lambda k: k <= self.samples, (2**n for n in count(1)))
        return tuple(sorted(set(self.pass_at or doubled)))

    @property
    def files(self) -> dict[str, str]:
        """Files of prompts by name, "" for a single file; {} without evaluation."""
        if self.prompts is None or self.every == 0:
            return {}
        return {"": self.prompts} if isinstance(self.prompts, str) else self.prompts

    def _faults(self) -> Faults:
        if self.map is not None and self.fields is not None:
            yield (
                "prompts.map",
                "eval.map",
                "eval.map and eval.fields are both set, but a mapping hook returns the whole prompt; leave one of "
                "them out",
            )
        if self.samples > 1 and self.temperature == 0:
            yield (
                "eval.samples",
                "eval.samples",
                f"eval.samples is {self.samples} but eval.temperature is 0: all answers to a prompt would be the same; "
                "set a temperature, or eval.samples=1",
            )
        beyond = [k for k in self.pass_at if k > self.samples]
        if beyond:
            yield (
                "eval.pass_at",
                "eval.pass_at",
                f"eval.pass_at has {beyond[0]}, but eval.samples is {self.samples}: pass@k needs at least k "
                "answers; raise eval.samples or leave it out",
            )
        if self.temperature == 0 and self.top_p < 1:
            yield (
                "eval.top_p",
                "eval.top_p",
                "eval.top_p has no effect on greedy answers; set eval.temperature or leave it out",
            )
        wrong = [name for name in self.files if "/" in name or (not name and len(self.files) > 1)]
        if wrong:
            yield (
                "eval.name",
                wrong[0],
                f"eval.prompts has the name {wrong[0]!r}; names are parts of metrics' names: use one without a slash",
            )
