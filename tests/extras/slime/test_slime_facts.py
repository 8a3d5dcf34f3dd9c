"""Facts of a run that slime hooks get, and verdicts of the reward hub, are those of slime: numbers of samples,
`args`, rules of `rm_type`. Unsupported functions are refused by name, for Miles' modules too."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.data.records import Group
from slimx.errors import SlimxError
from slimx.extras.slime.arguments import Arguments, RunFacts
from slimx.extras.slime.grading import async_rm, batched_async_rm, compute_score, deepscaler, f1_score
from slimx.extras.slime.recognition import NotServed, is_form_of
from slimx.extras.slime.sample import Sample
from slimx.orchestration.step.evaluation import answer_all
from slimx.rollout.hook_loading import load_hooks
from tests.extras.rewards.reward_stand import context, trajectory
from tests.refusals import cause
from tests.unit.rollout.rollout_stand import Stand, config_of, prompts

HUB = "slime.rollout.rm_hub"


def stand_of(config: Config) -> Stand:
    hooks = load_hooks(config)
    return Stand(config, generate=hooks.generate, reward=hooks.reward, keep=hooks.keep)


# Numbers of samples, and args -----------------------------------------------------------------------------------------

TELLS = """
from slime.rollout.sglang_rollout import generate as one

async def generate(args, sample, sampling_params):
    sample.metadata["seen"] = [sample.group_index, sample.index]
    return await one(args, sample, sampling_params)

async def rm(args, sample):
    same = [sample.group_index, sample.index] == sample.metadata["seen"]
    return sample.index + args.rollout_max_response_len / 1000 if same else -1

def keep(args, samples):
    numbers = [sample.index for sample in samples]
    group = {sample.group_index for sample in samples}
    if len(samples) == args.n_samples_per_prompt and numbers == sorted(numbers) and len(group) == 1:
        return args.rollout_batch_size == 4 and args.own == "x"
    return f"{numbers} of {group}"
"""


async def test_samples_have_global_indices_in_generate_reward_and_filter(mine):
    """Samples are numbered as by slime's data source: group_index by prompt, index by sample, through the whole run."""
    name = mine(TELLS)
    config = config_of(
        generate=f"slime:{name}.generate",
        filter=f"slime:{name}.keep",
        reward__function=f"slime:{name}.rm",
        options={"own": "x"},
        sampling={"max_new_tokens": 8},
        routed_experts=False,
        eval__prompts="heldout.jsonl",
    )
    async with stand_of(config) as stand:
        batches = [await stand.next_batch(), await stand.next_batch()]
        assert [batch.dropped.total() for batch in batches] == [0, 0], stand.dropped[:1]
        made = [t for batch in batches for group in batch.groups for t in group.trajectories]
        assert [t.metadata["seen"] for t in made] == [[n // 2, n] for n in range(16)]
        assert [t.reward for t in made] == [n + 0.008 for n in range(16)]
        outcomes = await answer_all(stand.maker, {"": prompts()[:3]})
    seen = [t.metadata["seen"] for outcome in outcomes for t in outcome.group.trajectories]
    assert seen == [[None, number] for number in range(3)], "an evaluation's samples have no group in slime"


def test_a_greedy_rollout_has_a_number_that_no_sample_has():
    run = RunFacts.of(config_of(algorithm__name="remax"))
    numbers = [run.indices(f"g{group}", index) for group in range(3) for index in range(3)]
    assert len({index for _, index in numbers}) == 9 and [group for group, _ in numbers] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_group_without_a_number_is_refused():
    with pytest.raises(SlimxError) as refused:
        RunFacts().indices("first", 0)
    assert (refused.value.code, refused.value.about) == ("slime.group_id", "first")


KEPT = {"prompt": "12+34=", "response": "46", "label": "46", "reward": None, "rollout_id": None}
KEPT |= {"train_metadata": None, "session_id": None, "non_generation_time": 0.0, "attributes": {}}


# Rules of the reward hub ----------------------------------------------------------------------------------------------


def judged(response: str, label: Any = "46", **metadata: Any) -> Sample:
    return Sample(response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"<think>so \boxed{46}", "46", 0),  # it never ended its thinking
        (r"<think>so \boxed{45}</think>\boxed{46}", "46", 1),
        (r"<think>so \boxed{46}</think>it is 46", "46", 0),
        (r"<think>so \boxed{46}</think>well</think>\boxed{45}", "46", 0),
        (r"\boxed{46}", "46", 0),
        (r"thoughts ###Response \boxed{46}", r"\boxed{46}", 1),
    ],
)
async def test_deepscaler_pays_what_stands_behind_the_thinking(response, label, score):
    assert deepscaler(response, label) == score
    assert await async_rm(Arguments({"rm_type": "deepscaler"}), judged(response, label)) == score


@pytest.mark.parametrize(
    ("response", "right", "score"),
    [
        ("yes", "yes", (1.0, 1.0, 1.0)),
        ("Yes.", "the yes", (1.0, 1.0, 1.0)),
        ("yes it is", "yes", (0.0, 0.0, 0.0)),
        ("no", "no answer is known", (0.0, 0.0, 0.0)),
        ("noanswer", "noanswer here", (0.0, 0.0, 0.0)),
        ("a red house", "the red door", (0.5, 0.5, 0.5)),
        ("red", "red big house", (0.5, 1.0, pytest.approx(1 / 3))),
        (None, "red", (0.0, 0.0, 0.0)),
        ("", "", (0.0, 0.0, 0.0)),
    ],
)
def test_f1_gives_nothing_for_words_around_yes_no_and_noanswer(response, right, score):
    assert f1_score(response, right) == score


def test_the_dapo_scorer_looks_at_the_end_of_the_text_alone():
    """Only the last 300 characters count, and 100 for a box in the strict form: what the prompt has boxed is no
    answer."""
    text = r"What is 40 + 6? For example \boxed{46}. Answer: 46"
    assert compute_score(text + "." * 100, "46", strict_box_verify=True)["pred"] is None
    assert compute_score(text + " " * 300, "46")["score"] == -1.0
    assert compute_score(text + " " * 300 + "Answer: 46", "46")["score"] == 1.0
    assert compute_score(text + "." * 300 + r"\boxed{46}", "46", strict_box_verify=True)["score"] == 1.0
    assert compute_score("." * 300 + "Answer: 45", "46") == {"score": -1.0, "acc": False, "pred": "45"}


@pytest.mark.parametrize(
    ("rm_type", "response", "reward"),
    [
        ("math", r"so \boxed{46}", 1),
        ("boxed_math", r"so \boxed{46}", 1),
        ("boxed_math", r"so \boxed{45}", 0),
        ("boxed_math", "so 46", 0),
        ("boxed_dapo", r"so \boxed{46}", 1.0),
        ("boxed_dapo", r"so \boxed{45}", -1.0),
        ("boxed_dapo", "Answer: 46", -1.0),
        ("boxed_deepscaler", r"<think>so</think>\boxed{46}", 1),
        ("boxed_f1", r"so \boxed{46}", 1.0),
        ("math", r"<think>so \boxed{46}</think>It is 45", 0),
        ("math", r"<think>so \boxed{46}", 0),
        ("math", r"\boxed{46}. Or \boxed{4", 0),
        ("math", r"so \fbox{46}", 1),
        ("dapo", "<think>Answer: 46</think>no", -1.0),
        ("f1", "<think>46</think>no", 0.0),
    ],
)
async def test_a_rule_grades_the_final_answer_or_what_its_last_box_holds(rm_type, response, reward):
    result = await async_rm(Arguments({"rm_type": rm_type}), judged(response))
    assert (result["score"] if isinstance(result, dict) else result) == reward


# The hub as a reward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["trajectory", "group"])
async def test_the_hub_itself_is_a_reward_that_goes_by_rm_type(scope):
    name = "async_rm" if scope == "trajectory" else "batched_async_rm"
    options = {"rm_type": "f1"}
    config = config_of(reward__function=f"slime:{HUB}.{name}", reward__options=options, reward__scope=scope)
    hooks = load_hooks(config)
    assert hooks.reward.needs_process, "its rules are interrupted in a process's main thread alone"
    args = Arguments({**hooks.reward.run.values, "custom_rm_path": f"{HUB}.{name}", **options})
    assert await async_rm(args, judged("46")) == 1.0
    assert await batched_async_rm(args, [judged("46"), judged("47"), judged("yes", "yes")]) == [1.0, 0.0, 1.0]
    assert await async_rm(args, judged(r"\boxed{46}", rm_type="boxed_f1")) == 1.0
    with pytest.raises(SlimxError) as refused:
        await async_rm(args, judged("46", rm_type="ifbench"))
    assert (refused.value.code, refused.value.about) == ("slime.rm_type", "ifbench")


async def test_a_reward_that_asks_for_itself_is_refused(mine):
    name = mine(
        f"from {HUB} import async_rm, batched_async_rm\n"
        "async def rm(args, sample):\n    return await async_rm(args, sample)\n"
        "async def other(args, sample):\n    args.custom_rm_path = None\n    return await async_rm(args, sample)\n"
        "async def all(args, samples):\n    return await batched_async_rm(args, samples)\n"
    )
    ctx = context("46")
    one = replace(trajectory(), group_id="g2", metadata={"slime": KEPT})

    def hook(function: str, scope: str = "trajectory") -> Any:
        config = config_of(
            reward__function=f"slime:{name}.{function}", reward__options={"rm_type": "f1"}, reward__scope=scope
        )
        return load_hooks(config).reward

    assert await hook("other")(ctx, one) == 1.0
    assert await hook("other")(ctx, one) == 1.0, "nothing is left of the call before"
    with pytest.raises(SlimxError) as refused:
        await hook("rm")(ctx, one)
    assert (refused.value.code, refused.value.about) == ("slime.recursion", f"{name}.rm")
    group = Group(id="g2", prompt=ctx.prompt, trajectories=[one])
    with pytest.raises(SlimxError) as refused:
        await hook("all", "group")(ctx, group)
    assert (refused.value.code, refused.value.about) == ("slime.recursion", f"{name}.all")
    # From elsewhere than the reward it is asked as before, for several samples at once too.
    args = Arguments({"custom_rm_path": f"{name}.other", "rm_type": "f1"})
    assert await async_rm(args, judged("46")) == 1.0


# What is not served ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("reward__function", f"{HUB}.remote_rm"),
        ("reward__function", f"{HUB}.gpqa.compute_gpqa_reward"),
        ("reward__function", "miles.rollout.rm_hub.remote_rm"),
        ("filter", "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"),
        ("filter", "miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted"),
        ("generate", "slime.rollout.sglang_rollout.generate_rollout"),
        ("generate", "miles.rollout.generate_hub.multi_turn.generate"),
        ("generate", "slime_plugins.rollout.generate"),
    ],
)
def test_a_function_of_slimes_that_is_not_served_is_refused_by_name(key, path):
    with pytest.raises(SlimxError) as refused:
        load_hooks(config_of(**{key: f"slime:{path}"}))
    assert (refused.value.code, refused.value.about) == ("slime.not_served", path)
    assert "\n" not in str(refused.value)
    with pytest.raises(SlimxError) as caught:  # without the prefix: which one to write
        load_hooks(config_of(**{key: path}))
    assert (caught.value.code, caught.value.about) == ("hooks.prefix", path)


MILES = """
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.rm_hub import batched_async_rm, grade_answer_verl
from miles.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from miles.rollout.rm_hub.math_dapo_utils import compute_score
from miles.rollout.sglang_rollout import GenerateState, generate as one
from miles.utils.http_utils import post
from miles.utils.misc import load_function
from miles.utils.processing_utils import load_tokenizer
from miles.utils.types import Sample

async def generate(args, sample, sampling_params):
    assert isinstance(sample, Sample) and GenerateState(args).tokenizer
    return await one(args, sample, sampling_params)

async def rm(args, sample):
    return 10 * sample.index + args.n_samples_per_prompt + args.own

def keep(args, samples):
    return DynamicFilterOutput(keep=True)
"""


async def test_hooks_of_miles_run_where_its_modules_are_slimes_by_another_name(mine):
    """The reward runs in a process, since its module has rules of the hub; it gets the facts of the run there too."""
    name = mine(MILES)
    config = config_of(
        generate=f"slime:{name}.generate",
        filter=f"slime:{name}.keep",
        reward__function=f"slime:{name}.rm",
        reward__options={"own": 0.5},
        reward__workers=1,
        reward__deadline=600,
        routed_experts=False,
    )
    async with stand_of(config) as stand:
        batch = await stand.next_batch()
        rewards = [t.reward for group in batch.groups for t in group.trajectories]
        stand.maker.close()
    assert rewards == [10 * n + 2 + 0.5 for n in range(8)], stand.dropped[:1]


@pytest.mark.parametrize(
    "text",
    [
        "from miles.rollout.base_types import GenerateFnInput",
        "from miles.utils.lora import LORA_ADAPTER_NAME",
        "import miles_plugins",
    ],
)
def test_features_of_miles_alone_are_refused_by_name(mine, text):
    name = mine(f"{text}\nasync def generate(args, sample, sampling_params): ...\n")
    with pytest.raises(SlimxError) as refused:
        load_hooks(config_of(generate=f"slime:{name}.generate"))
    assert (refused.value.code, refused.value.about) == ("slime.not_served", f"{name}.generate")
    assert cause(refused.value, NotServed).name == text.split()[1]


@pytest.mark.parametrize("root", ["slime", "miles"])
def test_a_hook_of_slime_or_miles_is_recognized_without_the_prefix(mine, root, monkeypatch):
    name = mine(f"from {root}.utils.types import Sample\nasync def generate(*everything): ...\n")
    # As in a process where no such hook was loaded before.
    monkeypatch.setattr("sys.meta_path", [finder for finder in sys.meta_path if not hasattr(finder, "exec_module")])
    for module in [name for name in sys.modules if name.partition(".")[0] == root]:
        monkeypatch.delitem(sys.modules, module)
    assert is_form_of(f"{name}.generate")
