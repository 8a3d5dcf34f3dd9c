"""Hooks that were written for slime. They import slime, which need not be installed.

    slimx train FILE rollout.generate=slime:examples.slime_style.search rollout.options.turns=3 \
        reward.function=slime:examples.slime_style.right reward.options.reward_key=score

`search` sends text, `calculate` sends token ids; both styles are common. Each entry of `rollout.options` becomes an
attribute of `args`.
"""

import re

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

BETWEEN_TURNS = re.compile(r" = \?\n|Go on\.|<[^<>]*>")
"""Pattern of the texts that the two hooks insert between turns, and of special tokens such as the end of a turn."""
FACTS = {"sum": "A sum is what two numbers make together.", "12": "12 is a dozen."}


async def search(args, sample: Sample, sampling_params) -> Sample:
    """Generates with text as input and output. The model may request a fact (<ask>word</ask>) before it answers."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sampling_params = {**sampling_params, "stop": ["</ask>"]}
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for _ in range(args.turns):
        output = await post(url, {"text": sample.prompt + sample.response, "sampling_params": sampling_params})
        meta = output["meta_info"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, _ in meta["output_token_logprobs"]],
            log_probs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
            meta_info=meta,
            text=output["text"],
        )
        if sample.status != Sample.Status.COMPLETED:
            break
        question = re.search(r"<ask>(.*?)</ask>", output["text"])
        reply = FACTS.get(question[1], "Nothing is known.") if question else "Go on."
        sample.append_response_tokens(
            args,
            tokens=state.tokenizer(reply, add_special_tokens=False)["input_ids"],
            trainable=False,
            text=reply,
        )
    return sample


async def calculate(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    """Generates with token ids as input and output. It sets the sample's lists itself, and adds an attribute that the
    reward needs."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, mask, logprobs, calls = [], [], [], 0
    for _ in range(args.turns):
        payload = {"input_ids": prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        response += [item[1] for item in meta["output_token_logprobs"]]
        logprobs += [item[0] for item in meta["output_token_logprobs"]]
        mask += [1] * (len(response) - len(mask))
        if meta["finish_reason"]["type"] == "length":
            break
        result = state.tokenizer(" = ?\n", add_special_tokens=False)["input_ids"]
        response, mask, logprobs = response + result, mask + [0] * len(result), logprobs + [0.0] * len(result)
        calls += 1
    sample.tokens, sample.response_length = prompt + response, len(response)
    sample.loss_mask, sample.rollout_log_probs = mask, logprobs
    sample.response = state.tokenizer.decode(response)
    sample.status = Sample.Status.TRUNCATED if meta["finish_reason"]["type"] == "length" else Sample.Status.COMPLETED
    sample.tool_calls = calls
    return sample


async def right(args, sample, **kwargs):
    """Returns a reward of several entries, of which `reward.options.reward_key` selects one. The answer is the whole
    text of the last turn. If a label anywhere in the response counted, listing enough numbers would earn the reward."""
    turns = [turn.strip() for turn in BETWEEN_TURNS.split(sample.response)]
    answer = next((turn for turn in reversed(turns) if turn), "")
    return {"score": float(answer == str(sample.label)), "calls": getattr(sample, "tool_calls", 0)}


def differ(args, samples, **kwargs) -> DynamicFilterOutput:
    """Keeps groups whose rewards are not all equal."""
    rewards = {sample.get_reward_value(args) for sample in samples}
    return DynamicFilterOutput(keep=len(rewards) > 1, reason=None if len(rewards) > 1 else "all equal")
