"""Which kernels a trainer runs on: every choice, refusal and fallback has a reason that names what decided it."""

from __future__ import annotations

import pytest

from slimx.config.sections.trainer import Trainer
from slimx.trainer.device.backends import FLASH as FLASHES
from slimx.trainer.device.backends import HYBRID, choose_backends, installed
from tests.refusals import refused

TE, FLASH, DEEP, APEX = "transformer_engine", "flash-attn-4", "deep_ep", "fused_weight_gradient_mlp_cuda"


def trainer(**fields: object) -> Trainer:
    return Trainer.model_validate({"world_size": 2, "expert": 2, **fields})


@pytest.mark.parametrize(
    ("attention", "device", "packages", "chosen", "why"),
    [
        ("auto", "cpu", {TE, FLASH}, "unfused", "CPUs"),
        ("auto", "cuda", set(), "unfused", "Transformer Engine"),
        ("auto", "cuda", {TE}, "auto", "chooses its fastest"),
        ("unfused", "cpu", set(), "unfused", "scaled_dot_product_attention"),
        ("unfused", "cuda", {TE}, "unfused", "Transformer Engine"),
        ("flash", "cuda", {TE, FLASH}, "flash", "as configured"),
        ("fused", "cuda", {TE}, "fused", "as configured"),
    ],
)
def test_the_attention_is_chosen_with_a_reason(attention, device, packages, chosen, why):
    backends = choose_backends(trainer(attention=attention), device=device, packages=packages)
    assert backends.attention == chosen and why in backends.reasons[0]


@pytest.mark.parametrize(
    ("fields", "device", "packages", "code", "named"),
    [
        ({"attention": "flash"}, "cpu", {TE, FLASH}, "trainer.no_cuda", "attention=flash"),
        ({"attention": "fused"}, "cuda", {FLASH}, "trainer.not_installed", TE),
        ({"attention": "flash"}, "cuda", {TE, "flash_attn"}, "trainer.not_installed", FLASH),
        ({"moe": {"dispatcher": "flex"}}, "cpu", {DEEP}, "trainer.no_cuda", "deepep"),
        ({"moe": {"dispatcher": "flex", "flex_backend": "hybridep"}}, "cuda", {DEEP}, "trainer.not_installed", HYBRID),
        ({"moe": {"dispatcher": "flex"}}, "cuda", {TE, HYBRID}, "trainer.not_installed", DEEP),
        ({"moe": {"dispatcher": "flex"}, "expert": 1}, "cuda", {DEEP}, "trainer.nothing_to_dispatch", "trainer.expert"),
    ],
)
def test_an_unavailable_backend_is_refused_by_key_and_package(fields, device, packages, code, named):
    key = "trainer.attention" if "attention" in fields else "trainer.moe.dispatcher"
    with refused(code, about=key) as error:
        choose_backends(trainer(**fields), device=device, packages=packages)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("device", "packages", "on"), [("cuda", {APEX}, True), ("cuda", {TE}, False), ("cpu", {APEX}, False)]
)
def test_gradients_accumulate_in_the_matrix_product_where_apex_is(device, packages, on):
    backends = choose_backends(trainer(), device=device, packages=packages)
    assert backends.gradient_accumulation_fusion is on
    if device == "cuda":
        assert ("on" if on else "off") in backends.reasons[1].split(":")[0].split()


def test_the_usual_kernels_of_cpus_are_one_line_and_configured_ones_more():
    fields = {"data": 2, "expert": 1}
    plain = choose_backends(trainer(**fields), device="cpu", packages={TE, APEX})
    assert len(plain.reasons) == 1 and " off " not in plain.reasons[0]
    chosen = choose_backends(trainer(**fields, overlap_grad_reduce=True), device="cpu", packages=set())
    assert len(chosen.reasons) == 2 and chosen.overlap_grad_reduce


def test_a_numerics_mode_computes_its_layers_with_transformer_engine():
    backends = choose_backends(trainer(), device="cuda", packages={TE, FLASH}, replaced=True)
    assert not backends.transformer_engine and backends.attention == "unfused"
    assert "numerics.mode" in backends.reasons[0]


def test_a_flex_dispatcher_is_taken_where_its_library_is():
    section = trainer(moe={"dispatcher": "flex", "flex_backend": "hybridep"})
    backends = choose_backends(section, device="cuda", packages={TE, DEEP, HYBRID})
    assert (backends.dispatcher, backends.flex_backend) == ("flex", "hybridep")


def test_only_packages_that_are_there_count_as_installed():
    for name in installed() - {*FLASHES, HYBRID}:
        __import__(name)
    assert APEX not in installed()


def test_flash_attention_and_hybridep_are_found(tmp_path, monkeypatch):
    """An environment with flash-attn-4's part of the module flash_attn and a deep_ep without HybridEPBuffer."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('no CUDA home')\n")
    assert installed() & {*FLASHES, "flash_attn", DEEP, HYBRID} == {DEEP}
    information = tmp_path / "flash_attn_4-4.0.0b36.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    (package / "__init__.py").write_text("from .hybrid_ep_buffer import HybridEPBuffer\n")
    assert installed() & {*FLASHES, "flash_attn", DEEP, HYBRID} == {FLASH, DEEP, HYBRID}


@pytest.mark.parametrize(
    ("device", "packages", "replaced", "on"),
    [
        ("cuda", {TE}, False, True),
        ("cuda", {TE}, True, False),
        ("cuda", {APEX}, False, False),
        ("cpu", {TE}, False, False),
    ],
)
def test_tokens_are_permuted_by_transformer_engine_in_fast_mode(device, packages, replaced, on):
    backends = choose_backends(trainer(), device=device, packages=packages, replaced=replaced)
    assert backends.permute_fusion is on


@pytest.mark.parametrize(
    ("device", "packages", "engine"), [("cuda", {TE}, True), ("cuda", {APEX}, False), ("cpu", {TE}, False)]
)
def test_the_layers_are_transformer_engines_where_it_can_compute_them(device, packages, engine):
    assert choose_backends(trainer(), device=device, packages=packages).transformer_engine is engine


DATA2 = {"data": 2}


@pytest.mark.parametrize(
    ("fields", "packages", "on"),
    [
        (DATA2, {TE}, True),
        ({"context": 2}, {TE}, True),
        ({"tensor": 2, "expert_tensor": 1}, {TE}, False),
        (DATA2, {APEX}, False),
        (DATA2 | {"overlap_grad_reduce": False}, {TE}, False),
        ({"overlap_grad_reduce": True}, {TE}, True),
    ],
)
def test_gradient_reduction_overlaps_with_several_ranks(fields, packages, on):
    backends = choose_backends(trainer(**fields), device="cuda", packages=packages, experts=8)
    assert backends.overlap_grad_reduce is on


@pytest.mark.parametrize(("device", "replaced"), [("cpu", False), ("cuda", True)])
def test_experts_of_plain_torch_may_have_no_gradients_to_wait_for(device, replaced):
    section = trainer(**DATA2, overlap_grad_reduce=True)
    assert choose_backends(section, device=device, packages={TE}, replaced=replaced).overlap_grad_reduce
    with refused("trainer.overlap_grad_reduce", about="trainer.overlap_grad_reduce"):
        choose_backends(section, device=device, packages={TE}, replaced=replaced, experts=8)


@pytest.mark.parametrize(("fields", "packages"), [(DATA2, {TE}), (DATA2 | {"overlap_grad_reduce": True}, {APEX})])
def test_parameter_gathering_overlaps_with_gradient_buckets(fields, packages):
    section = trainer(**fields, overlap_param_gather=True)
    assert choose_backends(section, device="cuda", packages=packages).overlap_param_gather
    with refused("trainer.overlap_param_gather", about="trainer.overlap_param_gather"):
        choose_backends(trainer(**DATA2, overlap_param_gather=True), device="cpu", packages=packages)


@pytest.mark.parametrize(
    ("device", "packages", "replaced", "code"),
    [
        ("cpu", {TE}, False, "trainer.no_cuda"),
        ("cuda", {APEX}, False, "trainer.not_installed"),
        ("cuda", {TE}, True, "trainer.not_installed"),
    ],
)
def test_moments_in_bf16_need_transformer_engines_adam(device, packages, replaced, code):
    section = trainer(optimizer={"moments_dtype": "bfloat16"})
    choose_backends(section, device="cuda", packages={TE})
    with refused(code, about="trainer.optimizer.moments_dtype"):
        choose_backends(section, device=device, packages=packages, replaced=replaced)
