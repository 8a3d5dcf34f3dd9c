"""Hooks written for slime: what they import and ask works on the run, and what does not is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Group, Trajectory
from slimx.data.saved.codec import decode, encode
from slimx.extras.slime import hooks as slime
from slimx.extras.slime.arguments import Arguments
from slimx.extras.slime.grading import compute_score, grade
from slimx.extras.slime.recognition import NotServed
from slimx.extras.slime.sample import Sample
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext
from slimx.rollout.policy import PolicyClient
from tests.extras.slime.slime_stand import END, PROMPT, Scripted, context, ids_of
from tests.refusals import cause, refused
from tests.unit.rollout.rollout_stand import config_of, the_tokenizer


def load(name: str, **options: Any) -> Any:
    reward = "slime"
    return load_hooks(config_of(generate=f"slime:{name}", options=options, reward__function=reward)).generate


def spans(trajectory: Trajectory) -> list[tuple[str, str, int | None]]:
    text = the_tokenizer().decode
    return [(s.source, text(trajectory.token_ids[s.start : s.stop]), s.version) for s in trajectory.spans]


async def test_a_hook_that_sends_text_continues_the_ids_that_were_sampled():
    """The first answer is spelled otherwise than the tokenizer would: it goes back to the engine as it was sampled."""
    odd = [ids_of("1")[0], *ids_of("<"), *ids_of("e"), *ids_of("n"), *ids_of("d"), *ids_of(">"), END]
    text = the_tokenizer().decode(odd)
    assert ids_of(text) != odd, "the tokenizer has another spelling"
    engine = Scripted(odd, "46")
    trajectory = await load("examples.slime_style.search", turns=2)(context(engine), PROMPT)
    begun = ids_of("<user>12+34=<assistant>")
    assert engine.requests[0][0] == begun and engine.requests[1][0] == begun + odd + ids_of("Go on.")
    assert engine.requests[0][2] != engine.requests[1][2], "each request has a seed of its own"
    assert engine.requests[0][1] == {
        "temperature": 1.0,
        "max_new_tokens": 32,
        "top_p": 1.0,
        "top_k": -1,
        "stop": ["</ask>"],
    }
    assert trajectory.token_ids.tolist() == engine.requests[1][0] + [*ids_of("46"), END]
    sampled = trajectory.versions() >= 0
    assert (trajectory.loss_mask.astype(bool) == sampled).all() and np.isnan(trajectory.logprobs[~sampled]).all()
    assert trajectory.logprobs[sampled].tolist() == [-(i + 1) / 8 for i in range(len(odd) + 3)]
    assert [(source, version) for source, _, version in spans(trajectory)] == [
        ("prompt", None),
        ("sampled", 6),
        ("sampled", 7),
        ("inserted", None),
        ("sampled", 6),
        ("sampled", 7),
    ]
    assert trajectory.routed_experts[:, 0, 0].tolist() == list(range(len(trajectory.token_ids) - 1))
    assert (trajectory.id, trajectory.group_id, trajectory.status) == ("4/1", "4", "completed")


async def test_a_hook_that_keeps_ids_is_rewarded_by_what_it_put_on_its_sample():
    config = config_of(
        generate="slime:examples.slime_style.calculate",
        options={"turns": 2},
        filter="slime:examples.slime_style.differ",
        reward__function="slime:examples.slime_style.right",
        reward__options={"reward_key": "score"},
        model__path="m",
    )
    hooks = load_hooks(config)
    trajectory = await hooks.generate(context(Scripted("45", "46")), PROMPT)
    assert [source for source, _, _ in spans(trajectory)][-1] == "sampled", "the tool's last words teach nothing"
    assert trajectory.metadata["slime"]["attributes"] == {"tool_calls": 2} and trajectory.metadata["level"] == 1
    trajectory = decode(Trajectory, encode(trajectory))  # as a checkpoint or a reward's process sees it
    ctx = RewardContext(PROMPT, the_tokenizer(), "", False)
    assert await hooks.reward(ctx, trajectory) == 1.0
    other = await hooks.generate(context(Scripted("45", "44")), PROMPT)
    assert await hooks.reward(ctx, other) == 0.0
    trajectory.reward, other.reward = 1.0, 0.0
    assert hooks.keep(Group(id="4", prompt=PROMPT, trajectories=[trajectory, other])) is True
    other.reward = 1.0
    assert hooks.keep(Group(id="4", prompt=PROMPT, trajectories=[trajectory, other])) == "all equal"


async def test_a_whole_group_is_made_by_hooks_of_slime():
    config = config_of(
        generate="slime:examples.slime_style.search",
        options={"turns": 1},
        filter="slime:slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        reward__function="slime:examples.slime_style.right",
        reward__options={"reward_key": "score"},
        routed_experts=False,
    )
    maker = GroupMaker(config, load_hooks(config), {"actor": PolicyClient(Scripted("46", "47"), the_tokenizer())})
    maker.version = 7  # of the tokens that it says
    outcome = await maker.make(PROMPT, group_id="4", number=4)
    maker.close()
    assert outcome.reason is None, outcome.detail
    assert sorted(t.reward for t in outcome.group.trajectories) == [0.0, 1.0]


async def test_agents_that_load_their_system_by_name_and_copy_args_are_served(mine):
    """As multi-agent systems do: several samples of one rollout, rewards set by the hook, args changed and copied."""
    system = mine(
        """
import asyncio
from copy import deepcopy
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def answer(args, prompt):
    sample = deepcopy(args.sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.prompt = prompt
    sample.tokens = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": sample.tokens, "sampling_params": args.sampling_params, "return_logprob": True}
    meta = (await post(url, payload))["meta_info"]
    sample.append_response_tokens(
        args, tokens=[x[1] for x in meta["output_token_logprobs"]],
        log_probs=[x[0] for x in meta["output_token_logprobs"]], meta_info=meta)
    sample.response = args.tokenizer.decode(sample.tokens[-sample.response_length:-1])
    return sample

async def run(args, sample):
    args = deepcopy(args)
    args.sample = sample
    samples = await asyncio.gather(*(answer(args, prompt) for prompt in ("1+1=", "2+2=")))
    for each, reward in zip(samples, await batched_async_rm(args, samples)):
        each.reward = reward * args.weight
        each.rollout_id = sample.index
    return list(samples)
"""
    )
    outer = mine(
        f"""
from slime.utils.misc import load_function
async def generate(args, sample, sampling_params, evaluation=False):
    args.sampling_params, args.tokenizer, args.weight = sampling_params, load_tokenizer(args), 0.5
    return await load_function("{system}.run")(args, sample)

def load_tokenizer(args):
    from slime.rollout.sglang_rollout import GenerateState
    return GenerateState(args).tokenizer
"""
    )
    hook = load(f"{outer}.generate", rm_type="f1")
    first, second = await hook(context(Scripted("46", "47"), routed=False), PROMPT)
    assert (first.id, second.id) == ("4/1-0", "4/1-1") and first.rollout_id == second.rollout_id == "4/1"
    ctx = RewardContext(PROMPT, the_tokenizer(), "", False)
    assert [await slime.reward(ctx, trajectory) for trajectory in (first, second)] == [0.5, 0.0]
    rewards = load_hooks(config_of(reward__function="slime:examples.slime_style.right")).reward
    assert await rewards(ctx, first) == 0.5, "a reward that the hook set is not asked for again"


CONVERSATION = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    messages = [{"role": "user", "content": sample.prompt}]
    def render(ask):
        return state.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    prompt = render(True)
    for said in ("again", "well", None):
        output = await post(url, {"text": render(True), "sampling_params": sampling_params})
        messages.append({"role": "assistant", "content": output["text"].removesuffix("<end>")})
        if said:
            messages.append({"role": "user", "content": said})
    start = len(state.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    tokens = state.tokenizer(render(False), add_special_tokens=False)["input_ids"]
    (assistant,) = state.tokenizer("<assistant>", add_special_tokens=False)["input_ids"]
    mask, inside = [], True
    for token in tokens[start:]:
        mask.append(int(inside))
        inside = token == assistant or (inside and token != state.tokenizer.eos_token_id)
    made = Sample(index=0, prompt=prompt, tokens=tokens, loss_mask=mask, reward=0.75, status="completed")
    made.response_length, made.metadata = len(mask), {"info": {"turns": 3}}
    return made
"""


async def test_a_retokenized_conversation_is_accepted_if_its_ids_are_equal(mine):
    """As tool-calling agents do: text in, no log-probs asked for, the tokens made from the chat template at the end."""
    hook = load(f"{mine(CONVERSATION)}.generate", apply_chat_template=False)
    engine = Scripted("46", "47", "48")
    trajectory = await hook(context(engine), PROMPT)
    assert the_tokenizer().decode(trajectory.token_ids[trajectory.loss_mask == 1]) == "46<end>47<end>48<end>"
    assert engine.requests[2][0] == trajectory.token_ids[: len(engine.requests[2][0])].tolist()
    assert trajectory.metadata["info"] == {"turns": 3} and trajectory.metadata["slime"]["reward"] == 0.75
    odd = [*ids_of("4"), *ids_of("<"), *ids_of("end"), *ids_of(">"), END]
    with refused("slime.token"):
        await hook(context(Scripted(odd, "47", "48")), PROMPT)


async def test_a_reward_set_by_the_hook_but_never_read_is_refused(mine):
    hook = load_hooks(config_of(generate=f"slime:{mine(CONVERSATION)}.generate")).generate
    with refused("slime.reward"):
        await hook(context(Scripted("46", "47", "48")), PROMPT)


ASKS = """
from slime.rollout.sglang_rollout import GenerateState, generate as one
from slime.utils.http_utils import post
async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    BODY
"""


@pytest.mark.parametrize(
    ("body", "code", "about"),
    [
        ("await post(url + '/v1/chat/completions', {})", "slime.path", "/v1/chat/completions"),
        ("await post(url + '/generate', {'text': ['a', 'b']})", "slime.payload", "input_ids"),
        ("await post(url + '/generate', {'text': 'a', 'image_data': []})", "slime.payload", "image_data"),
        ("await post(url + '/generate', {'text': 'a', 'stream': True})", "slime.payload", "stream"),
        ("return 3", "slime.returned", ""),
    ],
)
async def test_unsupported_features_of_slime_are_refused_by_name_in_a_hook(mine, body, code, about):
    path = mine(ASKS.replace("BODY", body)) + ".generate"
    hook = load(path)
    with refused(code, about=about or path):
        await hook(context(Scripted("1")), PROMPT)


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        ("return args.over_sampling_batch_size", AttributeError, "over_sampling_batch_size"),
        ("from slime.ray.rollout import x", ImportError, "slime.ray"),
    ],
)
async def test_missing_features_of_slime_are_named_while_a_hook_runs(mine, body, kind, name):
    hook = load(mine(ASKS.replace("BODY", body)) + ".generate")
    with pytest.raises(kind) as error:
        await hook(context(Scripted("1")), PROMPT)
    assert error.value.name == name


async def test_the_default_generate_of_slime_is_served(mine):
    name = mine(ASKS.replace("BODY", "return await one(args, sample, sampling_params)"))
    trajectory = await load(f"{name}.generate")(context(Scripted("46")), PROMPT)
    assert [source for source, _, _ in spans(trajectory)] == ["prompt", "sampled", "sampled"]
    assert trajectory.routed_experts is not None and trajectory.metadata["slime"]["response"] == "46<end>"


@pytest.mark.parametrize(
    ("module", "code", "lacking"),
    [
        (
            "from slime.agent.sandbox import Sandbox\nasync def generate(args, sample, sampling_params): ...",
            "slime.not_served",
            "slime.agent",
        ),
        (
            "from slime.utils.http_utils import get\nasync def generate(args, sample, sampling_params): ...",
            "slime.not_served",
            "slime.utils.http_utils.get",
        ),
        ("def generate(args, sample, sampling_params): ...", "slime.async", ""),
        ("async def generate(args, sample): ...", "slime.signature", ""),
        ("generate = 3", "slime.hook", ""),
    ],
)
def test_a_hook_that_cannot_work_is_refused_before_the_run(mine, module, code, lacking):
    path = mine(module) + ".generate"
    with refused(code, about=path) as error:
        load(path)
    assert not lacking or cause(error.value, NotServed).name == lacking


def test_options_that_only_the_run_can_say_are_refused():
    with refused("slime.option", about="sglang_router_ip"):
        load("examples.slime_style.search", turns=1, sglang_router_ip="10.0.0.1")


def test_a_hook_without_the_prefix_is_refused_with_the_prefixed_path(mine):
    name = mine("async def f(args, sample, sampling_params): ...\nasync def rm(args, sample, **kwargs): ...")
    with refused("hooks.prefix", about=f"{name}.f"):
        load_hooks(config_of(generate=f"{name}.f"))
    with refused("hooks.prefix", about=f"{name}.rm"):
        load_hooks(config_of(reward__function=f"{name}.rm"))


def test_an_import_that_a_hook_tries_may_fail_as_if_slime_lacked_it(mine):
    name = mine(
        "try:\n    from slime.utils.mask_utils import MultiTurnLossMaskGenerator\nexcept ImportError:\n    pass\n"
        "async def generate(args, sample, sampling_params): ..."
    )
    assert load(f"{name}.generate")


def test_lists_that_a_hook_holds_on_to_grow_with_its_sample():
    sample = Sample(tokens=[1], loss_mask=[])
    tokens, mask = sample.tokens, sample.loss_mask
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.1, -0.2])
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert tokens == [1, 2, 3, 4] and mask == [1, 1, 0]
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0] and sample.effective_response_length == 2
    for wrong in ({"tokens": [5]}, {"tokens": [5], "log_probs": [0.0], "trainable": False}):
        with pytest.raises(ValueError):
            sample.append_response_tokens(**wrong)
        assert (sample.tokens, sample.response_length) == ([1, 2, 3, 4], 3)


def test_arguments_can_be_copied_and_read_with_defaults():
    args = copy.deepcopy(Arguments({"a": [1]}))
    assert args.a == [1] and getattr(args, "b", 7) == 7


@pytest.mark.parametrize(
    ("solution", "answer", "strict", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", True, 1.0),
        (r"so \boxed{3}", "4", True, -1.0),
        ("Answer: 12", "12", False, 1.0),
        ("nothing", "12", False, -1.0),
        ("nothing", "12", True, -1.0),
    ],
)
def test_rules_that_published_rewards_import(solution, answer, strict, score):
    assert compute_score(solution, answer, strict_box_verify=strict)["score"] == score
    if strict:
        assert grade(solution, answer) == (score > 0)
