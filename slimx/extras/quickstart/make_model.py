"""Makes the quickstart's model: a seeded Qwen3-MoE of half a million parameters with a character tokenizer.

    python -m slimx.extras.quickstart.make_model --out DIR --seed 1

DIR gets what a published Qwen3-MoE checkpoint holds: config.json, generation_config.json, model.safetensors (float32,
one tensor per expert and projection) and the tokenizer. The same seed gives the same bytes.

One token is one character: `<user>12+34=<assistant>` is 8 tokens, and the response `46<end>` is 3.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

SPECIALS = ("<pad>", "<user>", "<assistant>", "<end>")
"""Token ids 0 to 3. A response ends with `<end>`."""

CHARACTERS = ("\n", *(chr(code) for code in range(0x20, 0x7F)))
"""Token ids 4 to 99: newline, then printable ASCII in order of code points."""

VOCAB_SIZE = 128
"""Rows of the embedding. Ids 100 to 127 have no token: published checkpoints also pad their vocabulary."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<user>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<assistant>' + message['content'] + '<end>' }}"
    "{%- else -%}{{ raise_exception('the quickstart template knows the roles user and assistant only') }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)

# In the words of a published config.json (`num_experts`, `rope_theta`), where transformers 5 would write newer ones:
# what reads the quickstart's model must read real checkpoints.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,  # of dense layers, of which there are none
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,  # a narrow model: 0.02 takes twice as long to learn the carries
    "use_cache": True,
    "pad_token_id": SPECIALS.index("<pad>"),
    "eos_token_id": SPECIALS.index("<end>"),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer: 4 specials and 96 characters, one token each. It raises on any other character instead of
    dropping it."""
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary))  # without an unknown token, so that an unknown character raises
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONFIG["max_position_embeddings"],
    )


def make_model(out: str | Path, seed: int = 1) -> None:
    """Writes the model and its tokenizer into the directory `out`, and creates the directory if needed."""
    out = Path(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).float()
    model.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    make_tokenizer().save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="make the quickstart's model")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    make_model(arguments.out, arguments.seed)
    print(f"{arguments.out}: Qwen3-MoE, {VOCAB_SIZE} token ids, seed {arguments.seed}")


if __name__ == "__main__":
    main()
