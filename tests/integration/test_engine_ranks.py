"""Engines of two ranks: each holds its part, and a publication leaves what a cold load of the same weights does.

Each server is started once: DeepSeek-V3 with everything split by tensor parallelism, whose latent attention computes
with tensors derived from the published ones. With `slow` also Qwen3-MoE with experts split over the ranks, and the
families of engine_families.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples import mixtral
from slimx.engines.server.engine import Engine, State
from slimx.engines.server.spec import EngineSpec
from slimx.extras.vision.nesting import separate_experts
from slimx.layout.engine import EngineLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import EngineSizes
from slimx.layout.table import Table, stored
from slimx.models.families import read_model
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from tests.integration import engine_families
from tests.integration.conftest import START_S, Bucket, Weights, manifest, perturbed, present, publish
from tests.integration.deepseek_checkpoint import DEEPSEEK, make_deepseek
from tests.processes import first_address
from tests.refusals import refused

pytestmark = pytest.mark.integration

PROMPT = [1, 20, 21, 15, 22, 23, 33, 2]


@dataclass(frozen=True, slots=True)
class Stand:
    """A running engine of two ranks and the model that it was started with."""

    engine: Engine
    model: Path
    weights: Weights
    """By Hugging Face name."""
    table: Table
    layout: EngineLayout
    cold: tuple[list[int], np.ndarray]
    """`answer` before anything was published."""

    def local(self, weights: Weights) -> list[Weights]:
        """Returns `weights` as the parameters of each rank."""
        ranks: list[Weights] = [{} for _ in range(self.layout.sizes.world)]
        for part in self.layout.parts():
            tensor = torch.zeros(part.shape)
            for r in part.rects:
                source = source_of(weights, part.sources[r.source])
                flat = source.view(matrix(source.shape))[r.row : r.row + r.rows, r.col : r.col + r.cols]
                target = tensor.view(matrix(tensor.shape))
                target[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = flat
            for rank in part.ranks:
                ranks[rank][part.name] = tensor
        return ranks

    def assert_same(self, one: np.ndarray, other: np.ndarray) -> None:
        """Asserts that log-probs are equal bit for bit, or up to rounding where attention has several copies: a health
        check on another copy is in the same batch of the experts."""
        atol = 1e-6 if self.layout.sizes.attention_data > 1 else 0.0
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)

    def named(self, weights: Weights) -> Weights:
        """Returns `weights` with the names that a publication with Hugging Face names has: experts that the checkpoint
        stacks are separate."""
        table = self.table
        separate = separate_experts(table)
        if separate.rows == table.rows:
            return weights
        found: Weights = {}
        for whole, entry in zip(table.entries(), separate.entries(), strict=True):
            if whole.sources == entry.sources:
                found |= {name: weights[name] for name in entry.sources}
            else:
                parts = source_of(weights, whole.sources[0]).chunk(len(entry.sources))
                found |= zip(entry.sources, parts, strict=True)
        return found

    def targets(self, weights: Weights, encoding: str) -> Weights | list[Weights]:
        return self.local(weights) if encoding == "local" else self.named(weights)


def source_of(weights: Weights, name: str) -> torch.Tensor:
    """Returns the tensor, or the item of a stack of experts, that a weight table calls `name`."""
    place = stored(name)
    tensor = weights[place.name]
    if place.index is None:
        return tensor
    return tensor[place.index].T.contiguous() if place.transposed else tensor[place.index]


async def answer(engine: Engine) -> tuple[list[int], np.ndarray]:
    """Returns greedy tokens, and the log-probs of prompt and tokens [L - 1]."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    meta = (await engine.wire.call("/generate", body, key=engine.spec.keys.api_key))["meta_info"]
    scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return [token for _, token, _ in meta["output_token_logprobs"]], np.array([value for value, _, _ in scored])


def expected(stand: Stand, weights: Weights, tokens: list[int], out: Path) -> np.ndarray:
    """Returns the log-probs that the model itself gives to prompt and tokens with `weights`."""
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((stand.model / "config.json").read_text())
    ids = [*PROMPT, *tokens]
    rows = engine_families.logits(out, ids)[:-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


STANDS = (
    "deepseek_v3, TP2",
    pytest.param("qwen3_moe, 2 x EP2", marks=pytest.mark.slow("full grid of families")),
    pytest.param("deepseek_v3, DP2 x EP2", marks=pytest.mark.slow("full grid of families")),
    *(pytest.param(f"{name}, TP2", marks=pytest.mark.slow("full grid of families")) for name in engine_families.MODELS),
    *(
        pytest.param(f"{name}, DP2 x EP2", marks=pytest.mark.slow("full grid of families"))
        for name in ("qwen3_next", "qwen3_5_moe")
    ),
)


@pytest.fixture(scope="module", params=STANDS)
def stand(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    model, sizes = tiny_model, EngineSizes(tensor=2, expert=2)
    name, _, split = request.param.partition(", ")
    if name != "qwen3_moe":
        copies = 2 if split.startswith("DP2") else 1
        model, sizes = tmp_path_factory.mktemp(name), EngineSizes(tensor=2, expert=copies, attention_data=copies)
        if name == "deepseek_v3":
            make_deepseek(model)
        else:
            engine_families.make_model(name, model)
    read = read_model(model, family=mixtral if name == "mixtral" else None)
    layout = EngineLayout(read.engine_table(), sizes)
    spec = EngineSpec(
        "ranks",
        str(model),
        "float32",
        "cpu",
        max_total_tokens=4096,
        sizes=sizes,
        routed_experts=read.experts > 0,
        sglang=read.engine_arguments,
    )
    engine = Engine(spec, tmp_path_factory.mktemp("ranks") / "server.log")
    try:
        asyncio.run(engine.start(START_S))
        weights = load_file(model / "model.safetensors")
        yield Stand(engine, model, weights, read.table, layout, asyncio.run(answer(engine)))
    finally:
        asyncio.run(engine.stop())


async def test_ranks_are_forked(stand: Stand) -> None:
    server = psutil.Process(stand.engine.process.pid).children()[0]
    ranks = [rank["pid"] for rank in stand.engine.attestation]
    assert {first_address(pid) for pid in (server.pid, *ranks)} == {first_address(server.pid)}


async def test_each_rank_holds_what_the_engine_layout_says(stand: Stand) -> None:
    sizes = stand.layout.sizes
    for number, rank in enumerate(await stand.engine.wire.request_ranks("attest")):
        place = rank["coordinates"]
        assert place == {
            "rank": number,
            "tensor": number,
            "expert": number % sizes.expert,
            "pipeline": 0,
            "attention_data": number % sizes.attention_data,
        }
    forms = [{part.name: form(part.shape) for part in stand.layout.parts() if rank in part.ranks} for rank in range(2)]
    assert await stand.engine.inventory("local") == forms
    named = stand.named(stand.weights)
    assert await stand.engine.inventory() == [{name: form(weight.shape) for name, weight in named.items()}]


def form(shape: tuple[int, ...]) -> str:
    return f"float32:{','.join(map(str, shape))}"


@pytest.mark.parametrize(("encoding", "staging"), [("hf", "bucket"), ("local", "model"), ("local", "bucket")])
async def test_a_publication_equals_a_cold_load(stand: Stand, encoding: str, staging: str, tmp_path: Path) -> None:
    other = perturbed(stand.weights, 3)
    await publish(stand.engine, stand.targets(other, encoding), 1, staging)
    tokens, logprobs = await answer(stand.engine)
    np.testing.assert_allclose(logprobs, expected(stand, other, tokens, tmp_path), atol=1e-4)
    assert np.abs(logprobs[: len(PROMPT) - 1] - stand.cold[1][: len(PROMPT) - 1]).max() > 0.1
    await publish(stand.engine, stand.targets(stand.weights, encoding), 2, staging)
    tokens, logprobs = await answer(stand.engine)
    assert tokens == stand.cold[0]
    stand.assert_same(logprobs, stand.cold[1])
    derived = (await stand.engine.verify())["derived"]
    latent = {"DeepseekV3ForCausalLM": "model.", "KimiK25ForConditionalGeneration": "language_model.model."}
    prefix = latent.get(stand.engine.attestation[0]["model"])
    layers = 0 if prefix is None else DEEPSEEK["num_hidden_layers"]
    assert derived == sorted(f"{prefix}layers.{k}.self_attn.{t}" for k in range(layers) for t in ("w_kc", "w_vc"))


@pytest.mark.parametrize("encoding", ["hf", "local"])
async def test_a_wrong_byte_ends_the_publication_on_all_ranks(stand: Stand, encoding: str) -> None:
    before = await answer(stand.engine)
    targets = stand.targets(perturbed(stand.weights, 4), encoding)
    await stand.engine.begin(await present(stand.engine, 9, encoding))
    with Bucket(*(targets if encoding == "local" else [targets])) as bucket:
        wrong = bucket.packed.targets[-1][5]
        bucket.flip(wrong.offset + wrong.nbytes - 1)
        with refused("receiver.checksum", about=wrong.name):
            await stand.engine.stage(bucket.packed, 0)
    assert [rank["open"] for rank in await stand.engine.wire.request_ranks("status")] == [None, None]
    assert stand.engine.state is State.READY
    after = await answer(stand.engine)
    assert after[0] == before[0]
    stand.assert_same(after[1], before[1])


async def test_a_tensor_of_another_rank_is_refused(stand: Stand) -> None:
    ranks = stand.local(stand.weights)
    name = next(name for name in ranks[1] if name.endswith(("experts.w2_weight", "mlp.down_proj.weight")))
    shape = tuple(ranks[1][name].shape)
    bias, query = "model.norm.bias", "model.layers.0.self_attn.q_proj.weight"
    cases = [
        ("receiver.tensor", bias, [{}, {bias: torch.ones(1)}], ["rank 1"]),
        ("plugin.bucket", "bucket 0", [{name: ranks[0][name]}], ["rank 1"]),
        ("receiver.form", name, [ranks[0], {name: torch.ones(1, 2)}], ["rank 1", "float32:1,2", form(shape)]),
        ("receiver.tensor", query, [{query: torch.ones(2)}, ranks[1]], ["rank 0"]),
    ]
    for code, about, targets, values in cases:
        await stand.engine.begin(await present(stand.engine, 9, "local"))
        with Bucket(*targets) as bucket, refused(code, about=about) as caught:
            await stand.engine.stage(bucket.packed, 0)
        assert all(value in str(caught.value) for value in values), caught.value
    last = next((name for name in stand.named(stand.weights) if ".experts.7." in name), None)
    if last is None:  # no experts, or stacked ones
        return
    await stand.engine.begin(await present(stand.engine, 9))
    eighth = last.replace(".7.", ".8.")
    with Bucket({eighth: torch.ones(64, 128)}) as bucket, refused("receiver.tensor", about=eighth):
        await stand.engine.stage(bucket.packed, 0)


async def test_one_publication_is_open_at_a_time(stand: Stand) -> None:
    engine = stand.engine
    epoch = (await present(engine, 20)).membership_epoch + 1
    first = manifest(20, "local", epoch)

    async def stage(of: Manifest, packed: PackedBucket) -> None:
        """Sends the bucket to the ranks directly: the engine would refuse it first."""
        which = {"policy": of.policy, "version": of.version, "epoch": of.membership_epoch, "bucket": 0}
        await engine.wire.request_ranks("stage", **which, ranks=packed.parts("local", 2))

    async def commit(version: int) -> None:
        await engine.wire.request_ranks("commit", version=version)

    with Bucket(*stand.local(stand.weights)) as bucket:
        with refused("receiver.not_open", about="version 20"):
            await stage(first, bucket.packed)
        await engine.begin(first)
        late, early = manifest(21, "local", epoch), manifest(21, "local", epoch - 1)
        for other, code, about in ((late, "receiver.open", str(first)), (early, "receiver.late", str(early))):
            with refused(code, about=about):
                await engine.begin(other)
            with refused("receiver.not_open", about="version 21") as caught:
                await stage(other, bucket.packed)
            assert str(first) in str(caught.value), "the one that is open"
        await engine.begin(manifest(21, "local", epoch + 1))
        await engine.stage(bucket.packed, 0)
        with refused("receiver.not_verified"):
            await commit(21)
        await engine.abort()
        with refused("receiver.not_open", about="version 21"):
            await commit(21)


async def test_a_part_of_the_weights_is_never_served(stand: Stand) -> None:
    engine, ranks = stand.engine, stand.local(stand.weights)
    name = next(name for name in ranks[0] if name.endswith(("o_proj.weight", "attention.dense.weight")))
    short = [ranks[0], {n: w for n, w in ranks[1].items() if n != name}]
    with Bucket(*short) as bucket:
        await engine.begin(await present(engine, 30, "local"))
        await engine.stage(bucket.packed, 0)
        await engine.pause()
        with refused("engine.not_staged", about=name) as caught:
            await engine.load()
        assert "rank 1" in str(caught.value)
        assert engine.state is State.PAUSED
        await engine.abort()
        await engine.begin(await present(engine, 30, "local"), "bucket")
        await engine.stage(bucket.packed, 0)
        await engine.load()
        with refused("engine.unverified", about=name):
            await engine.verify()
        assert engine.state is State.DIRTY
        with refused("engine.state", about="commit"):
            await engine.commit(30)
        with refused("engine.state", about="resume"):
            await engine.resume()
    with Bucket({}, {name: ranks[1][name]}) as rest:
        await engine.stage(rest.packed, 1)
        await engine.load()
    assert (await engine.verify())["checked"] == sum(map(len, ranks))
    await engine.commit(30)
    await engine.resume()
    assert (await answer(engine))[0] == stand.cold[0]
