"""Routers of the trainer against transformers and plain torch: replayed routes, auxiliary terms, selection biases.

Each layout is one start of gloo ranks that do all cases. All but one recompute activations, where
routers run again in the backward pass while other micro-batches are in flight.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.saved.codec import save_groups
from tests.integration import invariance_models, router_rank
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights, perturbed
from tests.integration.deepseek_v3_oracle import MODELS, Oracle
from tests.integration.family_laboratory import difference
from tests.integration.prediction_oracle import split_experts
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.trainer_rank import demonstrations

pytestmark = pytest.mark.integration

FULL = {"recompute": {"granularity": "full", "method": "uniform", "layers": 1}}
SELECTIVE = {"recompute": {"granularity": "selective", "modules": ["moe"]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "TP2xEP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1, **SELECTIVE},
    "PP2xVPP2": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2, **FULL},
    "CP2xEP2": {"world_size": 2, "context": 2, "expert": 2, **FULL},
}
WIDE = {
    "TP2xDP2xEP2": {"world_size": 4, "tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2, **FULL},
    "PP2xCP2xDP2xEP4": {"world_size": 8, "pipeline": 2, "context": 2, "data": 2, "expert": 4, **SELECTIVE},
}
RATE = 0.01
COEFFICIENT = 0.3
CASES: dict[str, dict[str, Any]] = {
    "V3 R3": {"routing_replay": "R3"},
    "Qwen R3": {"routing_replay": "R3"},
    "Qwen R2": {"routing_replay": "R2"},
    "V3 bias": {"bias_update_rate": RATE},
    "V3 z_loss": {"z_loss_coef": COEFFICIENT},
    "Qwen z_loss": {"z_loss_coef": COEFFICIENT},
    **{
        f"{model} {term}": {"aux_loss_coef": COEFFICIENT, "aux_loss_type": term}
        for model, term in (
            ("V3", "seq_aux_loss"),
            ("Qwen", "seq_aux_loss"),
            ("Qwen", "aux_loss"),
            ("Qwen", "global_aux_loss"),
        )
    },
}
"""`trainer.moe` by model and name."""
QUICK = {
    "single": set(CASES),
    "TP2xEP2": {"V3 R3", "V3 bias", "V3 seq_aux_loss", "Qwen z_loss"},
    "PP2xVPP2": {"V3 R3", "Qwen aux_loss"},
    "CP2xEP2": {"Qwen R3", "Qwen R2", "Qwen global_aux_loss"},
}
"""Cases of a layout in `make test`, where each is also taken by one rank."""
TOLERANCE = 1e-5
"""Largest max|a - b| / max|b| of a tensor."""


QWEN = invariance_models.QWEN | {
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_models(directory: Path) -> dict[str, Path]:
    """Writes checkpoints of two families, and of the second one a later policy that routes otherwise."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    qwen, later = directory / "Qwen", directory / "Qwen later"
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = 0.2 * torch.randn_like(tensor)
            tensor.add_(noise) if "norm" in name else tensor.copy_(noise)
    for path in (qwen, later):
        model.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(QWEN))  # in the words of a published one
    weights = perturbed(load_file(qwen / "model.safetensors"), 2, 0.05)
    save_file(weights, later / "model.safetensors", metadata={"format": "pt"})
    return {"V3": Oracle(directory / "V3", 0, MODELS["V3"]).path, "Qwen": qwen, "Qwen later": later}


Microbatches = Sequence[Sequence[int]]
"""Numbers of the sequences in each."""


class Ran(NamedTuple):
    logprobs: torch.Tensor
    """Log-probabilities of the labels, [L - 1]."""
    logits: dict[int, torch.Tensor]
    """Logits of each layer's router, [L - 1, experts], with gradient."""
    routes: np.ndarray
    """[L - 1, layers, k]; zeros for dense layers."""


class Trained(NamedTuple):
    loss: float
    term: float
    """Its mean over MoE layers, without the coefficient."""
    gradients: Weights
    load: dict[int, np.ndarray]
    """Tokens of each expert by MoE layer."""


class RoutedModel:
    """One model run sequence by sequence; `logits` of its routers are kept with their gradient."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.config = self.model.config
        self.layers = [n for n, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "gate")]
        self.experts, self.topk = 8, self.config.num_experts_per_tok
        self.sigmoid = "deepseek" in self.config.model_type
        self._forced: np.ndarray | None = None
        self._logits: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        for number in self.layers:
            self._record(number)

    def _record(self, number: int) -> None:
        gate = self.model.model.layers[number].mlp.gate
        choose = gate.forward

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, chosen = choose(hidden)
            if self._forced is not None:
                chosen = torch.from_numpy(self._forced[:, number].astype(np.int64))
                if self.sigmoid:
                    kept = logits.sigmoid().gather(1, chosen)
                    weights = self.config.routed_scaling_factor * kept / kept.sum(1, keepdim=True)
                else:
                    weights = logits.gather(1, chosen).softmax(1)
            self._logits[number], self._chosen[number] = logits, chosen
            return logits, weights, chosen

        gate.forward = forward

    def run(self, trajectory: Trajectory, forced: np.ndarray | None) -> Ran:
        """Runs its input positions with the routes `forced` [L - 1, layers, k], or its own."""
        tokens = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        self._forced, self._logits, self._chosen = forced, {}, {}
        logprobs = self.model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        routes = np.zeros((len(tokens) - 1, self.config.num_hidden_layers, self.topk), np.uint8)
        for number, experts in self._chosen.items():
            routes[:, number] = experts.numpy()
        return Ran(logprobs, self._logits, routes)

    def train(
        self,
        batch: Sequence[Trajectory],
        forced: Sequence[np.ndarray | None],
        term: str | None,
        coefficient: float,
        microbatches: Microbatches,
    ) -> Trained:
        """Takes a step on mean cross entropy per token plus `coefficient` times the sum of the term over layers."""
        self.model.zero_grad()
        ran = [self.run(trajectory, routes) for trajectory, routes in zip(batch, forced, strict=True)]
        weights = loss_weights(batch, "token")
        loss = -sum((torch.from_numpy(w) * x.logprobs).sum() for w, x in zip(weights, ran, strict=True))
        extra = torch.zeros(())
        if term:
            extra = sum(TERMS[term]([x.logits[n] for x in ran], self, microbatches) for n in self.layers)
        (loss + coefficient * extra).backward()
        routes = np.concatenate([x.routes for x in ran])
        return Trained(
            loss.item(),
            extra.item() / len(self.layers),
            split_experts({name: parameter.grad for name, parameter in self.model.named_parameters()}),
            {n: np.bincount(routes[:, n].ravel(), minlength=self.experts) for n in self.layers},
        )


def _scores(logits: torch.Tensor, model: RoutedModel) -> torch.Tensor:
    return logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if model.sigmoid else logits.softmax(1)


def _share(scores: torch.Tensor, model: RoutedModel) -> torch.Tensor:
    """Returns each expert's share of the tokens' top k."""
    return torch.bincount(scores.topk(model.topk).indices.flatten(), minlength=model.experts) / (
        len(scores) * model.topk
    )


def z_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    return torch.cat(logits).logsumexp(1).square().mean()


def seq_aux_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    scores = [_scores(part, model) for part in logits]
    return torch.stack([model.experts * (_share(s, model) * s.mean(0)).sum() for s in scores]).mean()


def aux_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    packs = [_scores(torch.cat([logits[i] for i in pack]), model) for pack in microbatches]
    count = sum(map(len, packs))
    return sum(len(s) / count * model.experts * (_share(s, model) * s.mean(0)).sum() for s in packs)


def global_aux_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    packs = [_scores(torch.cat([logits[i] for i in pack]), model) for pack in microbatches]
    count = sum(map(len, packs))
    return sum(
        len(s) / count * model.experts * (_share(torch.cat(packs[: n + 1]), model) * s.mean(0)).sum()
        for n, s in enumerate(packs)
    )


TERMS = {term.__name__: term for term in (z_loss, seq_aux_loss, aux_loss, global_aux_loss)}


class Laboratory:
    """Runs each layout once, with the cases of the chosen tests, and asks transformers once per case."""

    def __init__(self, directory: Path, chosen: set[tuple[str, str]]):
        """`chosen`: layouts and cases; one rank takes all cases."""
        self.directory, self.paths, self.chosen = directory, write_models(directory), chosen
        self.models = {name: RoutedModel(path) for name, path in self.paths.items()}
        self.trajectories = {name: demonstrations(0) for name in ("V3", "Qwen")}
        random = np.random.default_rng(3)
        for name, trajectories in self.trajectories.items():
            model = self.models[name]
            for trajectory in trajectories:
                # Any experts for any token: hardly one route is the model's own.
                shape = (len(trajectory.token_ids) - 1, model.config.num_hidden_layers, model.experts)
                trajectory.routed_experts = random.random(shape).argsort(-1)[..., : model.topk].astype(np.uint8)
                if name == "V3":
                    trajectory.routed_experts[:, 0] = 0  # engines report something for the dense layer
            group = Group(id="g", prompt=Prompt(id="p", token_ids=[1]), trajectories=trajectories)
            save_groups(directory / f"{name}.groups", [group])
        self.run_ranks = cached(self._run)
        self.expected = functools.cache(self._expected)

    def __call__(self, layout: str) -> Path:
        self.run_ranks(layout)
        return self.directory / layout

    def _run(self, layout_name: str) -> None:
        layout = (LAYOUTS | WIDE)[layout_name]
        cases = [
            {
                "name": name,
                "trainer": {"moe": moe},
                "path": self.paths[model],
                "groups": self.directory / f"{model}.groups",
                "later": self.paths["Qwen later"] if moe.get("routing_replay") == "R2" else None,
                "mtp": int(model == "V3"),
            }
            for name, moe in CASES.items()
            if layout_name == "single" or (layout_name, name) in self.chosen
            for model in [name.split()[0]]
        ]
        run_ranks(
            router_rank.train, self.directory / layout_name, layout["world_size"], {"cases": cases, "layout": layout}
        )

    def _expected(
        self, model: str, routes: str, term: str | None = None, microbatches: tuple[tuple[int, ...], ...] = ()
    ) -> Trained:
        """Returns what transformers does with its own routes, the engine's or those of the model named."""
        batch = self.trajectories[model.split()[0]]
        forced = [trajectory.routed_experts if routes == "engine" else None for trajectory in batch]
        if routes in self.models:
            with torch.no_grad():
                forced = [self.models[routes].run(trajectory, None).routes for trajectory in batch]
        return self.models[model].train(batch, forced, term, COEFFICIENT, microbatches)

    def gradients(self, layout: str, name: str) -> Weights:
        return load_file(self(layout) / f"{name}.safetensors")

    def metrics(self, layout: str, name: str) -> dict[str, float]:
        return json.loads((self(layout) / f"{name}.json").read_text())["metrics"]

    def microbatches(self, layout: str, name: str) -> tuple[tuple[int, ...], ...]:
        """Returns numbers of the sequences in each micro-batch, in order; for one data-parallel rank."""
        packs = json.loads((self(layout) / f"{name}.json").read_text())["microbatches"]
        order = {tuple(t.token_ids[:-1].tolist()): number for number, t in enumerate(demonstrations(0))}
        return tuple(tuple(order[tuple(tokens)] for tokens in pack) for pack in packs)


@pytest.fixture(scope="module")
def laboratory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    cases = [case for case in chosen_cases(request) if case.keys() == {"layout", "name"}]
    chosen = {(case["layout"], case["name"]) for case in cases}
    return Laboratory(tmp_path_factory.mktemp("router"), chosen)


def every_layout(*names: str) -> pytest.MarkDecorator:
    """Returns a parametrization over the cases in every layout."""
    return pytest.mark.parametrize(
        ("layout", "name"),
        [
            pytest.param(layout, name, marks=[] if name in QUICK.get(layout, ()) else [pytest.mark.slow("full grid")])
            for layout in (*LAYOUTS, *WIDE)
            for name in names
        ],
    )


@every_layout("V3 R3", "Qwen R3")
def test_replayed_routes_give_the_gradients_of_forced_routes(laboratory, layout, name):
    model = name.split()[0]
    free, expected = (laboratory.expected(model, routes) for routes in ("own", "engine"))
    assert difference(free.gradients, expected.gradients)[0] > 0.1  # its own routes would not do
    worst, tensor = difference(laboratory.gradients(layout, name), expected.gradients)
    assert worst <= TOLERANCE, tensor
    metrics = laboratory.metrics(layout, name)
    assert metrics["loss/sft"] == pytest.approx(expected.loss, abs=1e-5)
    for number, load in expected.load.items():
        assert metrics[f"router/imbalance/{number}"] == pytest.approx(load.max() / load.mean())


@every_layout("V3 R3")
def test_the_prediction_layer_chooses_by_itself_and_learns_alike(laboratory, layout, name):
    single, found = (laboratory.gradients(x, name) for x in ("single", layout))
    of_layer = [name for name in single if name.startswith("model.layers.4.") and "correction_bias" not in name]
    expected = {name: single[name] for name in of_layer}
    assert expected and all(gradient.any() for gradient in expected.values())
    worst, tensor = difference(found, expected)
    assert worst <= TOLERANCE, tensor


@every_layout("Qwen R2")
def test_new_weights_take_the_routes_that_the_old_ones_chose(laboratory, layout, name):
    free, expected = (laboratory.expected("Qwen later", routes).gradients for routes in ("own", "Qwen"))
    assert difference(free, expected)[0] > 0.1
    worst, tensor = difference(laboratory.gradients(layout, name), expected)
    assert worst <= TOLERANCE, tensor


@every_layout(*(name for name in CASES if name.split()[1] in TERMS))
def test_an_auxiliary_loss_adds_exactly_its_gradient(laboratory, layout, name):
    model, term = name.split()
    packed = ()
    if term in ("aux_loss", "global_aux_loss"):
        if layout in WIDE:
            pytest.skip("the term depends on micro-batches, and only those of one data-parallel rank are reported")
        packed = laboratory.microbatches(layout, name)
        assert len(packed) > 2
    expected = laboratory.expected(model, "own", term, packed)
    assert difference(laboratory.expected(model, "own").gradients, expected.gradients)[0] > 0.1  # it is seen
    worst, tensor = difference(laboratory.gradients(layout, name), expected.gradients)
    assert worst <= TOLERANCE, tensor
    if model == "Qwen":  # of the other one the mean over layers counts its prediction layer
        assert laboratory.metrics(layout, name)[f"router/{term}"] == pytest.approx(expected.term, rel=1e-5)


@every_layout("V3 bias")
def test_selection_biases_move_towards_equal_load_only_if_enabled(laboratory, layout, name):
    before = load_file(laboratory.paths["V3"] / "model.safetensors")
    after = load_file(laboratory(layout) / f"{name}.after.safetensors")
    other = load_file(laboratory("single") / "V3 z_loss.after.safetensors")
    for number, load in laboratory.expected("V3", "own").load.items():
        name = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        move = RATE * np.sign(load.mean() - load)
        assert len(set(move)) > 1
        assert torch.allclose(after[name] - before[name], torch.from_numpy(move).float(), atol=1e-6)
        assert torch.equal(other[name], before[name])
    prediction = "model.layers.4.mlp.gate.e_score_correction_bias"
    assert set((after[prediction] - before[prediction]).mul(1 / RATE).round().tolist()) >= {-1.0, 1.0}
