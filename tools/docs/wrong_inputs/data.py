"""Mistakes with prompts and held-out sets."""

from __future__ import annotations

import io
from typing import Any

import pyarrow
import pyarrow.parquet

from tools.docs.wrong_inputs.mistake import Mistake, prompts

GSM8K = '{"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = 7\\n#### 7"}\n'
DAPO = '{"prompt": [{"role": "user", "content": "3+4="}], "reward_model": {"ground_truth": "7", "style": "rule"}}\n'


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written)
    return written.getvalue()


USER = {"role": "user", "content": "3+4="}
TORN = _parquet([{"question": "3+4=", "answer": "7"}])[:-20]
LATIN_1 = '{"messages": [{"role": "user", "content": "Où est-il ?"}], "answer": "ici"}\n'.encode("latin-1")
PROMPTS = (
    Mistake("prompts that are not there", "train run.yaml rollout.prompts=promts.jsonl"),
    Mistake("prompts that a recipe names", "train run.yaml rollout.prompts=data/gsm8k-train.jsonl"),
    Mistake("an empty file of prompts", "train run.yaml", prompts()),
    Mistake("GSM8K as it was published", "train run.yaml", {"prompts.jsonl": GSM8K}),
    Mistake("DAPO as it was published", "train run.yaml", {"prompts.jsonl": DAPO}),
    Mistake("messages that are a text", "train run.yaml", prompts({"messages": "3+4=", "answer": "7"})),
    Mistake("messages that are texts", "train run.yaml", prompts({"messages": ["3+4="], "answer": "7"})),
    Mistake("turns of ShareGPT", "train run.yaml", prompts({"messages": [{"from": "human", "value": "3+4="}]})),
    Mistake("ShareGPT's name too", "train run.yaml", prompts({"conversations": [{"from": "human", "value": "3+4="}]})),
    Mistake("an answer that is a list", "train run.yaml", prompts({"messages": [USER], "answer": ["7"]})),
    Mistake("no messages", "train run.yaml", prompts({"answer": "7"})),
    Mistake("an id twice", "train run.yaml", prompts(*[{"id": "a", "messages": [USER], "answer": "7"}] * 2)),
    Mistake("a file in Latin-1", "train run.yaml", {"prompts.jsonl": LATIN_1}),
    Mistake("a data set of the Hub without hf://", "train run.yaml rollout.prompts=openai/gsm8k"),
    Mistake("a comma too many", "train run.yaml", prompts('{"messages": [], }')),
    Mistake("a line that is cut off", "train run.yaml", prompts('{"messages": [{"role": "user", "con')),
    Mistake("one long list of JSON", "train run.yaml", prompts([{"messages": [USER], "answer": "7"}])),
    Mistake("no answers, where the reward compares", "train run.yaml", prompts({"messages": [USER]})),
    Mistake("a prompt that is too long", "train run.yaml rollout.max_prompt_tokens=4"),
    Mistake("a torn parquet file", "train run.yaml rollout.prompts=prompts.parquet", {"prompts.parquet": TORN}),
    Mistake("a field that a file does not have", "train run.yaml 'rollout.fields={prompt: question}'"),
    Mistake("a field that is no field", "train run.yaml 'rollout.fields={question: prompt}'"),
    Mistake("a short name of a data set", "data dapo out.jsonl --from gsm8k.jsonl", {"gsm8k.jsonl": GSM8K}),
    Mistake("another data set's file", "data dapo-math-17k out.jsonl --from gsm8k.jsonl", {"gsm8k.jsonl": GSM8K}),
    Mistake("data without the file to write", "data gsm8k"),
    Mistake("data check of nothing", "data check nowhere.jsonl"),
    Mistake("held-out prompts that are not there", "train run.yaml eval.prompts=heldout.jsonl eval.every=1"),
    Mistake("an evaluation without prompts", "train run.yaml eval.every=1"),
    Mistake("a held-out set without its file", "train run.yaml 'eval.prompts={sums: {samples: 4}}'"),
    Mistake(
        "an unknown key of a held-out set", "train run.yaml 'eval.prompts={sums: {path: prompts.jsonl, sample: 4}}'"
    ),
    Mistake(
        "several greedy answers for a held-out set",
        "train run.yaml 'eval.prompts={sums: {path: prompts.jsonl, samples: 4}}'",
    ),
    Mistake(
        "a held-out set that is not there",
        "train run.yaml 'eval.prompts={sums: {path: heldout.jsonl, max_new_tokens: 8}}'",
    ),
    Mistake(
        "held-out answers that are too long", "train run.yaml eval.prompts=prompts.jsonl eval.max_new_tokens=100000"
    ),
    Mistake(
        "a held-out set whose answers are greedy",
        "train run.yaml eval.samples=4 eval.temperature=1 'eval.prompts={sums: {path: prompts.jsonl, temperature: 0}}'",
    ),
    Mistake(
        "a held-out set with fewer answers than k",
        "train run.yaml eval.pass_at=[4] 'eval.prompts={sums: {path: prompts.jsonl, samples: 2, temperature: 1}}'",
    ),
    Mistake("a held-out set with a slash in its name", "train run.yaml 'eval.prompts={math/sums: prompts.jsonl}'"),
    Mistake("a held-out set without a name", "train run.yaml 'eval.prompts={\"\": {path: prompts.jsonl, samples: 4}}'"),
    Mistake("evaluation engines without prompts", "train run.yaml 'eval.engines=[{max_total_tokens: 4096}]'"),
    Mistake(
        "evaluation engines with the name of others",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{name: actor, max_total_tokens: 4096}]'",
    ),
    Mistake(
        "running servers as evaluation engines",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{urls: [\"http://127.0.0.1:30000\"]}]'",
    ),
    Mistake(
        "evaluation engines of several policies",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{count: 1}]' 'policies={judge: {}}'",
    ),
    Mistake(
        "evaluation engines with external servers' keys",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{api_key_env: KEY}]'",
    ),
    Mistake(
        "evaluation engines that exact mode does not support",
        "train run.yaml eval.prompts=prompts.jsonl numerics.mode=exact 'eval.engines=[{tensor: 2, dp_attention: 2}]'",
    ),
    Mistake(
        "evaluation engines that are split wrongly",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{tensor: 2, expert: 3}]'",
    ),
    Mistake(
        "an unknown key of evaluation engines",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{tensr: 2}]'",
    ),
    Mistake(
        "evaluation engines with an argument that SGLang lacks",
        "train run.yaml eval.prompts=prompts.jsonl 'eval.engines=[{sglang: {mem_fraction: 0.8}}]'",
    ),
    Mistake("a list of held-out files", "train run.yaml 'eval.prompts=[prompts.jsonl]'"),
)
