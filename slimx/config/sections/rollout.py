"""Sections rollout and eval: what is generated, and on what it is tried."""

from __future__ import annotations

from itertools import count, takewhile
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from slimx.config.section import LARGEST, Amount, Count, Faults, PathText, Real, Seconds, Section, Share, Weight
from slimx.config.sections.engines import Engines, Health, group_faults

MAX_SUPPORT = 4096
"""Candidates that an engine reports for a token sampled under top-k or top-p (SGLang's sampling_mask_max_tokens)."""
GREEDY = 1e-6
"""Temperature below which SGLang takes the likeliest token (`_SAMPLING_EPS`), and nucleus mass up to which no second
one is kept, of any vocabulary of less than a million tokens."""

ROUTED_PER_STEP = 4
"""Rollouts of a step, at least, that come with their tokens' experts where nothing replays or saves those of all."""

RENDERED = {"conversation", "messages", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict"}
"""Arguments of a chat template's rendering that are not the user's."""


class Fields(Section):
    """Columns of a row, dotted where a value lies inside another, such as reward_model.ground_truth."""

    prompt: str
    """Column of the question, text that becomes one user turn, or of a list of messages."""
    answer: str | None = None
    """Column of the answer; numbers are taken as text."""
    answer_after: str | None = None
    """Text after whose last occurrence the answer stands, such as '####' in GSM8K; a row without it is refused."""
    id: str | None = None
    """Column of an id that is unique in the file; a row without one, or every row if null, is named by the file's stem
    and its number."""
    dataset: str | None = None
    """Column of the data set's name, for metrics and `reward.parts`."""
    rejected: str | None = None
    """Column of the rejected answer, for preference learning."""
    tools: str | None = None
    """Column of tools that the chat template shows, as a list or as JSON."""
    images: str | None = None
    """Column of images, kept unchanged in metadata.images for hooks."""
    metadata: tuple[str, ...] = ()
    """Columns kept in the prompt's metadata."""


class PromptSet(Section):
    """One of several sources."""

    path: PathText
    """File, directory or hf://OWNER/NAME."""
    name: str
    """Name of the source in metrics, and the prompts' metadata.dataset where a row names none."""
    weight: Weight | dict[Count, Weight] = 1.0
    """Share of the prompts in proportion to the other sources', or a mapping from a step to the weight that holds from
    then on; before the first of them it is 0."""
    subset: str | None = None
    """Configuration of a data set that has several."""
    split: str | None = None
    """Split of a data set that has several."""
    fields: Fields | None = None
    """Columns of this source; null: `rollout.fields`."""

    def weight_at(self, step: int) -> float:
        """Weight in the batch of `step`, from 0."""
        if not isinstance(self.weight, dict):
            return self.weight
        return next((self.weight[start] for start in sorted(self.weight, reverse=True) if start <= step), 0.0)


def source_faults(sources: tuple[PromptSet, ...]) -> Faults:
    """Yields a name that two sources have, and a step at which no source has any weight."""
    names = [each.name for each in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        yield (
            "sources.name",
            twice[0],
            f"rollout.sources names {twice[0]!r} twice; give each source its own name",
        )
    if not sources:
        return
    starts = {0, *(step for each in sources if isinstance(each.weight, dict) for step in each.weight)}
    for step in sorted(starts):
        if not any(each.weight_at(step) for each in sources):
            yield (
                "sources.weight",
                "rollout.sources",
                f"rollout.sources: no source has a weight at step {step}; give one of them more than 0",
            )
            return


class Sampling(Section):
    temperature: Weight = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description=f"Nucleus mass kept, of at most {MAX_SUPPORT} candidates."
    )
    top_k: int = Field(default=-1, ge=-1, le=LARGEST, description=f"Candidates kept, at most {MAX_SUPPORT}; -1: all.")
    max_new_tokens: Amount = 1024
    """Tokens sampled per turn, at most."""
    stop_token_ids: tuple[Count, ...] = ()
    """Extra ids that end a turn (the model's eos always does)."""

    @property
    def greedy(self) -> dict[str, float]:
        """The keys, with their values, that make every answer to a prompt the same; {}: answers differ."""
        found = {"temperature": self.temperature < GREEDY, "top_k": self.top_k == 1, "top_p": self.top_p <= GREEDY}
        return {key: getattr(self, key) for key, greedy in found.items() if greedy}

    def _faults(self) -> Faults:
        if self.top_k == 0:
            yield (
                "sampling.top_k",
                "rollout.sampling.top_k",
                "rollout.sampling.top_k is 0, which keeps no candidate; use -1 for all or a positive count",
            )
        if self.top_k > MAX_SUPPORT:
            yield (
                "sampling.top_k",
                "rollout.sampling.top_k",
                f"rollout.sampling.top_k is {self.top_k}, but engines report at most {MAX_SUPPORT} kept candidates per "
                "token, which the trainer needs; lower it or use -1 for all",
            )


class Proxy(Section):
    host: str = "127.0.0.1"
    """Address by which agents reach the run; beyond loopback unencrypted."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0: any that is free."""

    def _faults(self) -> Faults:
        if self.host in ("0.0.0.0", "::", ""):
            yield (
                "proxy.host",
                "rollout.proxy.host",
                f"rollout.proxy.host is {self.host!r}, which is no address that an agent could be told; give the "
                "driver's own",
            )


class Rollout(Section):
    prompts: PathText | None = None
    """File of prompts (JSONL, JSON, CSV, TSV, parquet, Arrow), directory of such files, or hf://OWNER/NAME
    (docs/data.md)."""
    sources: tuple[PromptSet, ...] = ()
    """Several sources instead of `prompts`, each with its share of every batch."""
    fields: Fields | None = None
    """Columns of rows that are not of slimx's own form; null: they are."""
    map: str | None = None
    """Dotted path of a hook instead of `fields`: to_prompt(row) -> dict of id, messages or token_ids, answer,
    metadata, tools, template."""
    system: str | None = None
    """System turn that prompts without one begin with."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking: false}; a prompt's own `template` goes before them."""
    source: str | None = None
    """Dotted path of the user's own order of prompts: source(prompts, seed) -> DataSource; null: shuffled epochs."""
    prompts_per_step: Amount = 32
    """Prompts (groups) trained per step."""
    over_sampling: float | None = Field(default=None, ge=1, le=1_000_000)
    """Groups in flight while a step waits for its own, over prompts_per_step, rounded up; null: max_staleness + 1 -
    window, as many as can be trained in time. Those that cannot are generated anew."""
    partial: bool = False
    """Engines rest while trainers train: unfinished rollouts are interrupted, keep their tokens, and go on in the next
    step; needs schedule.max_staleness."""
    group_size: Amount = 8
    """Rollouts per prompt."""
    generate: str = "single_turn"
    """The data-generation hook: the name of one of slimx's (docs/hooks.md), or the dotted path of yours."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `generate`."""
    filter: str | None = None
    """Dotted path of the group filter: keep(group) -> bool | reason."""
    replay: PathText | None = None
    """Directory of a run whose saved rollouts (`track.rollouts`) are trained again, step by step; no engine is started
    and nothing is generated."""
    engines: tuple[Engines, ...] = (Engines(),)
    """Groups of servers; empty: no generation (SFT)."""
    sampling: Sampling = Sampling()
    proxy: Proxy = Proxy()
    max_prompt_tokens: Amount = 1024
    """Longer prompts are refused before the run starts."""
    concurrency: Amount = 256
    """Requests of rollouts to the engines in flight, at most."""
    max_rollouts: Amount = 4096
    """Rollouts in flight, at most, those whose tools run included."""
    affinity: Literal["prefix", "group", "rollout"] = "prefix"
    """Requests that go to one engine: those that share a long prefix (unless it is far busier than the others), all of
    a prompt's rollouts, or all of one rollout."""
    request_deadline: Seconds = 600
    """Seconds for one request to an engine."""
    request_retries: Count = 2
    """Times that a request is sent again when its engine was lost."""
    rollout_deadline: Seconds = 1800
    """Seconds for one rollout; its waits for `concurrency` and for engines that rest are not counted."""
    interrupt_deadline: Seconds = 30
    """Seconds for interrupted requests (between the steps of engines that rest, and before a run that leaves is saved)
    to come back with their tokens; those that do not are asked for again, and lose what they sampled since."""
    max_failed_share: Share = 0.1
    """Share of a step's groups that may fail before the run stops."""
    routed_experts: bool = True
    """Return tokens' experts with completions (MoE): of every rollout where they are replayed
    (`trainer.moe.routing_replay: R3`) or saved (`track.rollouts.routes`), else of four to seven rollouts of a step, by
    which metrics and saved rollouts say where trainer and engine chose others."""
    gap_probe: Count = 4
    """Rollouts re-scored by an engine per step where no token is on-version."""
    health: Health = Health()

    @property
    def longest(self) -> int:
        """Tokens of a rollout of one turn, at most."""
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def served(self) -> tuple[Engines, ...]:
        """Groups that this run starts, or reaches: none where rollouts are replayed."""
        return () if self.replay else self.engines

    @property
    def sampled(self) -> bool:
        """True if engines sampled what is trained, in this run or in the one that is replayed."""
        return any(not group.frozen for group in self.engines)

    @property
    def policy_engines(self) -> tuple[Engines, ...]:
        """Groups that serve the policy: what trainers publish to and rollouts sample from."""
        return tuple(group for group in self.served if not group.frozen)

    @property
    def frozen_engines(self) -> tuple[Engines, ...]:
        """Groups of other models, which hooks reach by name."""
        return tuple(group for group in self.served if group.frozen)

    @property
    def external_hosts(self) -> dict[str, str]:
        """Host of each engine of the policy that runs already, by the engine's name."""
        return {
            f"{group.name}-{number}": urlsplit(url).hostname or ""
            for group in self.policy_engines
            for number, url in enumerate(group.urls)
        }

    @property
    def disaggregated(self) -> bool:
        """True if different servers compute prompts and samples (prefill and decode)."""
        return any(group.role != "regular" for group in self.engines)

    def _faults(self) -> Faults:
        if self.prompts is None and not self.sources:
            yield (
                "config.missing_key",
                "rollout.prompts",
                "rollout.prompts is missing; set it in the file or with rollout.prompts=VALUE, or give rollout.sources",
            )
        if self.prompts is not None and self.sources:
            yield (
                "sources.both",
                "rollout.prompts",
                "rollout.prompts and rollout.sources are both given; make the file one of the sources",
            )
        if self.map is not None and (self.fields is not None or any(each.fields for each in self.sources)):
            yield (
                "prompts.map",
                "rollout.map",
                "rollout.map and fields are both given; a mapping hook returns the prompt itself, so leave one out",
            )
        if self.source is not None and self.sources:
            yield (
                "sources.source",
                "rollout.source",
                "rollout.source is given, which orders prompts itself, and rollout.sources, which have weights; leave "
                "one out",
            )
        if taken := sorted(self.template.keys() & RENDERED):
            yield (
                "template.argument",
                f"rollout.template.{taken[0]}",
                f"rollout.template has {taken[0]!r}, which slimx gives the chat template itself; leave it out",
            )
        yield from source_faults(self.sources)
        yield from group_faults(self.engines)
        if self.disaggregated and self.routed_experts:
            yield (
                "rollout.routed_experts",
                "rollout.routed_experts",
                "rollout.routed_experts with prefill and decode groups: the decode server, whose answer counts, never "
                "computed the experts of the prompt; set rollout.routed_experts=false",
            )


class Eval(Section):
    prompts: PathText | dict[str, PathText] | None = None
    """File of held-out prompts (as `rollout.prompts`), or several by name, which is metadata.dataset of prompts whose
    row names none, so that `reward.parts` can judge each file by its own reward; null: no evaluation."""
    fields: Fields | None = None
    """Columns of their rows where these are not of slimx's own form; `rollout.fields` and `rollout.map` are for
    training prompts alone, `rollout.system` and `rollout.template` for both."""
    map: str | None = None
    """Dotted path of a hook instead of `fields`, as `rollout.map`, which may be the same one."""
    every: Count | None = None
    """Steps between evaluations; null: only before and after the run; 0: none at all."""
    samples: Amount = 1
    """Answers per prompt: eval/accuracy is their mean reward (avg@k), eval/pass@k is for k up to this."""
    pass_at: tuple[Amount, ...] = ()
    """Values of k for which eval/pass@k is given, none above `samples`; empty: 2, 4, 8, ... up to it."""
    temperature: Weight = 0.0
    """Softmax temperature of the answers; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass kept where it is not greedy."""
    passing: Real = 1.0
    """Reward from which an answer counts as right: in pass@k, and where lengths are measured by outcome."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for which pass@k is given, ascending."""
        doubled = takewhile(lambda k: k <= self.samples, (2**n for n in count(1)))
        return tuple(sorted(set(self.pass_at or doubled)))

    @property
    def files(self) -> dict[str, str]:
        """Files of prompts by name; a single one is named "". There are none where nothing is evaluated."""
        if self.prompts is None or self.every == 0:
            return {}
        return {"": self.prompts} if isinstance(self.prompts, str) else self.prompts

    def _faults(self) -> Faults:
        if self.map is not None and self.fields is not None:
            yield (
                "prompts.map",
                "eval.map",
                "eval.map and eval.fields are both given; a mapping hook returns the prompt itself, so leave one out",
            )
        if self.samples > 1 and self.temperature == 0:
            yield (
                "eval.samples",
                "eval.samples",
                f"eval.samples is {self.samples} but eval.temperature is 0: all answers to a prompt would be the same; "
                "set a temperature, or eval.samples=1",
            )
        if beyond := [k for k in self.pass_at if k > self.samples]:
            yield (
                "eval.pass_at",
                "eval.pass_at",
                f"eval.pass_at has {beyond[0]}, but eval.samples is {self.samples}: pass@k takes k answers or "
                "more; raise eval.samples or leave it out",
            )
        if self.temperature == 0 and self.top_p < 1:
            yield (
                "eval.top_p",
                "eval.top_p",
                "eval.top_p cuts nothing where answers are greedy; set eval.temperature or leave it out",
            )
        if wrong := [name for name in self.files if "/" in name or (not name and len(self.files) > 1)]:
            yield (
                "eval.name",
                wrong[0],
                f"eval.prompts has the name {wrong[0]!r}; names stand in metrics and have no slash",
            )
