"""Every shipped configuration with engines in fp8: what the trainers would send is what SGLang's own model holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.extras.convert.formats.fp8 import with_quantization
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.reshard.plan.publication import PublicationPlan, publication_plan
from tests.function_call import call_with_sglang
from tests.unit.adapters.sglang_ranks import built, join, pretend_hopper

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(ROOT.glob("configs/moe/*.yaml"))
OFTEN = {"kimi-k2", "glm-4.5", "qwen3-30b-a3b-async-fp8"}
Built = dict[str, tuple[PublicationPlan, int, dict[str, Any]]]
"""By configuration and group: the plan, a rank of the engine, and what that rank holds."""
OF_RUN = {"mem_fraction_static"}
"""Fields of `sglang` that change no weight."""


def shallow(config: Config) -> dict[str, Any]:
    """Returns the model's config.json with its dense layers and two of experts."""
    hf = json.loads((ROOT / config.model.path / "config.json").read_text())
    # SGLang's CPU builds no rotary embedding of pairs without scaling, which GLM-5 lacks.
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "rope_theta": 10000}
    turned = {"rope_parameters": yarn} if "GlmMoeDsa" in hf["architectures"][0] else {}
    if "text_config" in hf:
        return {**hf, "text_config": {**hf["text_config"], "num_hidden_layers": 2}}
    return {**hf, **turned, "num_hidden_layers": hf.get("first_k_dense_replace", 0) + 2, "num_nextn_predict_layers": 0}


def plan_of(config: Config, group: Engines, directory: Path) -> tuple[ModelSpec, PublicationPlan]:
    """Plans the publication of `group` alone, from one trainer rank; writes the config.json of its engines."""
    hf = shallow(config)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**hf, "quantization_config": None}))
    spec = read_model(directory)
    rollout = config.rollout.model_copy(update={"engines": (group.model_copy(update={"role": "regular"}),)})
    published = publication_plan(config.model_copy(update={"rollout": rollout}), spec, Sizes(), "cuda")
    served = spec.engine_table()
    plain = sorted({name for entry in served.entries() if not entry.row.quantized for name in entry.sources})
    matrices = [name for name in plain if name.endswith(".weight") and "norm" not in name and "experts." not in name]
    quantized = with_quantization(hf, quantization(config.publish.quantize), matrices)
    (directory / "config.json").write_text(json.dumps(hf if hf.get("quantization_config") else quantized))
    return spec, published


def forms_of(path: str, rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns {"hf": {tensor: form}, "local": {parameter: form}, "uncovered": {encoding: {parameter: why}}} of one rank
    of SGLang's model, as a server on Hopper has it."""
    pretend_hopper()
    return forms(built(join(path, rank, world, **arguments), "meta"))


def forms(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the result of `forms_of` for a model of SGLang."""
    from slimx.adapters.sglang.weights.layout import hf_layout
    from slimx.adapters.sglang.weights.places import local_layout

    layouts = {"hf": hf_layout(model), "local": local_layout(model)}
    return {
        **{name: {tensor: place.form for tensor, place in layout.places.items()} for name, layout in layouts.items()},
        "uncovered": {name: layout.uncovered for name, layout in layouts.items()},
    }


def engines_of(files: list[Path], directory: Path) -> Built:
    """Returns the engines of these configurations, built by SGLang."""
    engines = {}
    for file in files:
        config = load_config(file, [])
        for group in config.served.policy if config.publish.quantize else ():
            name = f"{file.stem}-{group.name}"
            _, published = plan_of(config, group, directory / name)
            sizes = {"ep_size": group.expert, "dp_size": group.dp_attention, "pp_size": group.pipeline}
            arguments = sizes | {key: value for key, value in group.sglang.items() if key not in OF_RUN}
            arguments["enable_dp_attention"] = group.dp_attention > 1
            rank = group.tensor - 1
            forms = call_with_sglang(forms_of, str(directory / name), rank, group.tensor, arguments)
            engines[name] = published, rank, forms
    return engines


def sent_to(published: PublicationPlan, rank: int) -> dict[str, str]:
    """Returns name and form of each tensor that an engine's rank gets; in Hugging Face names all ranks get all."""
    target = published.plan.buckets[rank if published.encoding == "local" else 0]
    return {
        tensor.name: f"{tensor.dtype}:{','.join(map(str, tensor.shape))}"
        for bucket in target
        for tensor in bucket.tensors
    }


def check(engines: Built) -> None:
    for name, (published, rank, forms) in engines.items():
        sent = sent_to(published, rank)
        assert forms["uncovered"] == {"hf": {}, "local": {}}, name
        assert any(form.startswith("float8_e4m3fn") for form in sent.values()), name
        assert sent == forms[published.encoding], name
        scales = {form.partition(":")[0] for tensor, form in forms["hf"].items() if tensor.endswith("_scale_inv")}
        assert scales == {"float32"}, name


def test_every_parameter_of_an_fp8_engine_is_reached(tmp_path: Path) -> None:
    """Whole dense layers with DeepEP, DeepEP alone, and engines whose own layout is published to."""
    engines = engines_of([file for file in CONFIGS if file.stem in OFTEN], tmp_path)
    assert len(engines) == len(OFTEN)
    assert {plan.encoding for plan, _, _ in engines.values()} == {"hf", "local"}
    check(engines)


@pytest.mark.slow("full grid of shipped configurations")
def test_so_is_every_other_configurations(tmp_path: Path) -> None:
    engines = engines_of([file for file in CONFIGS if file.stem not in OFTEN], tmp_path)
    assert engines
    check(engines)
