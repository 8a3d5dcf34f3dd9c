"""Environment with a search tool over a local corpus: the model sends a query, reads the passages found, and answers.

    slimx train FILE rollout.generate=multi_turn \\
        rollout.options.environment=examples.search.Search rollout.options.environment_options.corpus=corpus.jsonl

The corpus has one {"title": ..., "text": ...} per line. After a turn with <search>words</search>, the next turn is the
best passages (BM25). Any other turn is the last one. Its reward is 1 if the answer that it marks has exactly the words
of the prompt's answer, so that repeating a whole passage earns nothing.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path

from slimx.data.records import Prompt
from slimx.environments.base import Step
from slimx.extras.boxes.programs.answers import marked_answer

K1, B = 1.2, 0.75
"""Parameters of BM25: saturation of repeated words, and discount of long passages."""
ASK = "Search with <search>words</search>, and put your answer between <answer> and </answer>."


class Search:
    def __init__(self, *, corpus: str, passages: int = 2):
        records = [json.loads(line) for line in Path(corpus).read_text().splitlines() if line.strip()]
        self.texts = [f"{record['title']}: {record['text']}" for record in records]
        self.counts = [Counter(words(text)) for text in self.texts]
        self.passages = passages

    async def reset(self, prompt: Prompt, seed: int) -> str:
        self.answer = prompt.answer or ""
        return ASK

    async def step(self, text: str) -> Step:
        queries = re.findall(r"<search>(.*?)</search>", text, re.DOTALL)
        if not queries:
            right = words(marked_answer(text) or "") == words(self.answer)
            return Step(done=True, reward=float(right and self.answer != ""))
        return Step(text="\n".join(self.best(words(queries[-1]))) or "Nothing found.", tool_calls=1)

    async def close(self) -> None:
        pass

    def best(self, query: list[str]) -> list[str]:
        """Returns the passages that match the query best; passages without any of its words are omitted."""
        mean = sum(count.total() for count in self.counts) / len(self.counts)
        holding = {word: sum(word in count for count in self.counts) for word in query}

        def score(count: Counter[str]) -> float:
            length = 1 - B + B * count.total() / mean
            return sum(
                math.log(1 + (len(self.counts) - holding[word] + 0.5) / (holding[word] + 0.5))
                * (count[word] * (K1 + 1) / (count[word] + K1 * length))
                for word in query
            )

        scores = [score(count) for count in self.counts]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [self.texts[number] for number in order[: self.passages] if scores[number] > 0]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
