"""The rank of test_untouched: megatron-core's own gated delta nets, which slimx has not touched, load checkpoints.

    python -m tests.integration.untouched_rank JOB.json 0

CASE.npz holds the logits of the case's token lists under the converted checkpoint (`converted.N`) and under the one
that slimx's trainer saved (`saved.N`); CASE.json the local tensors that a trainer loads otherwise from a checkpoint of
another system than from the Hugging Face directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from tests.integration.rank_start import join, leave
from tests.integration.saving import begin_save, finish_save


def configuration(out: Path, hf: str, load: str | None = None) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": hf},
            "numerics": {"dtype": "float32"},
            "trainer": {"load": load, "optimizer": {"lr": 1e-3}},
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
        }
    )


def untouched(trainer: Any) -> Any:
    """megatron-core's model with the blocks that it specifies itself, in fp32 on the CPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    from slimx.trainer.model.transformer import transformer_config

    spec = trainer.weights.spec
    config = transformer_config(spec, trainer.config, trainer.backends, cpu=True)
    block = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(config, block, **spec.gpt)


def load(model: Any, path: Path) -> None:
    """Load as Megatron-LM does, by megatron-core's own reader."""
    from megatron.core import dist_checkpointing, parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})}
    # Transformer Engine's extra state is in no checkpoint without it: --dist-ckpt-strictness log_all.
    loaded = dist_checkpointing.load(state, str(path), strict="log_all")
    odd = model.load_state_dict(loaded["model"], strict=False)
    assert not odd.unexpected_keys and all("_extra_state" in key for key in odd.missing_keys), odd


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, length = torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
    )
    with torch.no_grad():
        out = model(torch.tensor([tokens]), torch.arange(length)[None], None, packed_seq_params=packed)
    return out[0].numpy()


def without_own_key(release: Path) -> None:
    """Take slimx's own keys out of a checkpoint: it is then as another system writes it."""
    import pickle

    metadata = pickle.loads((release / ".metadata").read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.endswith("out_norm.factor")]:
        del metadata.state_dict_metadata[key]
    (release / ".metadata").write_bytes(pickle.dumps(metadata))


def main() -> None:
    file = Path(sys.argv[1])
    job, out = json.loads(file.read_text()), file.parent
    parallel = join(configuration(out, job["cases"][0]["hf"]).trainer, 0, job["init_method"])
    import torch

    from slimx.models.families import configured_model
    from slimx.trainer.trainer import PolicyTrainer

    for case in job["cases"]:
        config = configuration(out, case["hf"])
        trainer = PolicyTrainer(config, configured_model(config), parallel)
        trainer.optimizer.step()  # without gradients; now there is state to save
        saved = out / f"{case['name']}.saved" / "iter_0000001"
        begin_save(trainer, saved, step=1)
        finish_save(trainer, saved)
        kept = {name: tensor.detach().clone() for name, tensor in trainer.weights.parameters.items()}
        with torch.no_grad():
            for tensor in trainer.weights.parameters.values():
                tensor.add_(1.0)
        trainer.restore(str(saved), same_layout=True)
        assert all(torch.equal(kept[name], tensor) for name, tensor in trainer.weights.parameters.items())
        found, release = {}, Path(case["megatron"]) / "release"
        for kind, path in (("converted", release), ("saved", saved)):
            model = untouched(trainer)
            load(model, path)
            found |= {f"{kind}.{n}": logits(model, tokens) for n, tokens in enumerate(case["tokens"])}
        np.savez(out / f"{case['name']}.npz", **found)
        without_own_key(release)
        other = PolicyTrainer(configuration(out, case["hf"], case["megatron"]), configured_model(config), parallel)
        here, there = trainer.weights.parameters, other.weights.parameters
        differing = [name for name in here if not torch.allclose(here[name], there[name], rtol=1e-6, atol=1e-7)]
        (out / f"{case['name']}.json").write_text(json.dumps(differing))
    leave(parallel)


if __name__ == "__main__":
    main()
