"""Makes a tiny policy for environments of other projects: it ends every turn with one of a few given answers.

    python examples/environments/make.py --out DIR --answers '["<answer>Left</answer>", "<answer>Right</answer>"]'

DIR gets the quickstart's model, whose chat template here also has the system's turns, tools and their results, and
demonstrations.jsonl: conversations of random text whose last turn is one of the answers, drawn at random. Fine-tuned on
them (sft.yaml), the policy answers any environment, and its rollouts of one prompt get different rewards.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
from slimx.extras.quickstart.make_model import CHARACTERS, make_model, make_tokenizer  # noqa: E402

DEMONSTRATIONS = 6400
LONG_SHARE = 0.1
"""Share of the conversations with texts of up to 900 characters; the others have up to 100."""

CHAT_TEMPLATE = (
    "{%- if tools -%}<user>{%- for tool in tools -%}{{ tool.function.name + ' ' }}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<assistant>' + (message['content'] or '') + '<end>' }}"
    "{%- else -%}{{ '<user>' + message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)


def conversation(rng: random.Random, answers: list[str]) -> list[dict[str, Any]]:
    """Returns messages of random text, with one to three turns of the user and answers between them."""
    longest = 900 if rng.random() < LONG_SHARE else 100
    messages = []
    for turn in range(rng.randint(1, 3)):
        if turn:
            messages.append({"role": "assistant", "content": rng.choice(answers)})
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, longest // (turn + 1))))
        messages.append({"role": "user", "content": text})
    return messages


def make(out: Path, answers: list[str], seed: int = 1) -> None:
    """Writes the model and the demonstrations into the directory `out`, and creates the directory if needed."""
    make_model(out / "model", seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out / "model")
    rng = random.Random(seed)
    with (out / "demonstrations.jsonl").open("w") as file:
        for number in range(DEMONSTRATIONS):
            line = {
                "id": f"demo-{number}",
                "messages": conversation(rng, answers),
                "answer": rng.choice(answers),
                "metadata": {},
            }
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="make a tiny policy for environments of other projects")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--answers", required=True, type=json.loads, help="JSON list of the texts that turns end with")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make(arguments.out, arguments.answers)
    print(f"{arguments.out}: model, demonstrations.jsonl of {len(arguments.answers)} answers")


if __name__ == "__main__":
    main()
