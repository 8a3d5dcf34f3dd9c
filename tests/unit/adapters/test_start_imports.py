"""Imports that a start does without: SGLang's models that nothing is published to, megatron-core's compiler and
trackers, files of installed packages, the generation of text, and torch where nothing is computed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimx import entry_points
from slimx.adapters.transformers import recorded_packages
from slimx.models.families import GROUP

LISTED = Path(__file__).parents[3] / "slimx/adapters/sglang/models/published.py"
TRAINED_ONLY = {"MiMoForCausalLM", "NemotronHForCausalLM"}
"""Families that engines are refused."""
UNCOMPILED = """
import sys, torch
from slimx.adapters.megatron.imports import uncompiled, untracked
compiler = torch.compile
with uncompiled(), untracked():
    import megatron.core
assert torch.compile is compiler
print(*(name in sys.modules for name in ("torch._inductor.compile_fx", "tensorboard", "megatron.core.transformer")))
import torch.utils.tensorboard  # which a driver needs later
"""


def test_every_family_has_its_class_among_the_models_that_servers_import():
    assigned = [node for node in ast.parse(LISTED.read_text()).body if isinstance(node, ast.Assign)]
    (modules,) = (ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "MODULES")
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    sources = [Path(package, "srt", "models", f"{name}.py").read_text() for name in modules]
    classes = {node.name for text in sources for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert set(entry_points.find(GROUP)) - TRAINED_ONLY <= classes


def test_a_model_that_a_processor_lacks_kernels_for_costs_servers_no_other(monkeypatch: pytest.MonkeyPatch):
    def imported(name: str) -> SimpleNamespace:
        if name == "sglang.srt.models.qwen3_next":
            raise AttributeError("no such kernel")
        return SimpleNamespace(EntryClass=[name] if name.endswith("llama") else name)

    monkeypatch.setattr(importlib, "import_module", imported)
    found = runpy.run_path(str(LISTED))
    others = [name for name in found["MODULES"] if name != "qwen3_next"]
    assert found["EntryClass"] == [f"sglang.srt.models.{name}" for name in others]


def test_untrained_processes_import_megatron_core_without_compilers():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", UNCOMPILED], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True"] and done.returncode == 0, done.stderr


def test_a_tokenizer_loads_without_text_generation(tmp_path: Path):
    script = """
import sys
from slimx.adapters.transformers import import_transformers
import_transformers()
from transformers import AutoTokenizer
print(*(name in sys.modules for name in ("transformers.generation.utils", "torch._dynamo", "torch.distributed.tensor")))
from transformers.models.auto import auto_factory
import torch
class Own(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...
own = auto_factory.add_generation_mixin_to_remote_model(Own)
from transformers import GenerationMixin
print(Own in own.__mro__, own.generate is GenerationMixin.generate)
from transformers import Qwen2Config, Qwen2ForCausalLM
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
saved = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, num_hidden_layers=1, **sizes))
saved.save_pretrained(sys.argv[1])
from slimx.extras.cpu.adapters import megatron
megatron.install()
loaded, tokens = Qwen2ForCausalLM.from_pretrained(sys.argv[1]), torch.arange(8)[None]
print(torch.equal(loaded.model.rotary_emb.inv_freq, saved.model.rotary_emb.inv_freq))
print(torch.equal(loaded(tokens).logits, saved(tokens).logits))
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["False"] * 3 + ["True"] * 4 and done.returncode == 0, done.stderr


def test_commands_that_plan_or_only_look_at_a_run_import_nothing_heavy():
    script = """
import sys
import slimx.extras.planner.plan.report
import slimx.extras.direct.transport, slimx.extras.disk.transport
import slimx.extras.watch.rollouts, slimx.extras.watch.status, slimx.extras.watch.page.server
print(*(name for name in ("torch", "ray", "sglang", "megatron", "transformers") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout == "\n" and done.returncode == 0, done.stderr


def test_the_actors_of_engines_import_no_torch():
    script = "import sys, slimx.engines.server.engine, slimx.extras.multi_node.nodes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_the_entry_of_a_server_imports_no_configuration():
    script = "import sys, slimx.engines.server.launch; print('pydantic' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_rank_reports_its_node_before_torch_is_imported():
    """Variables that torch reads are set later, by `slimx.trainer.process.prepare_process`."""
    script = "import sys, slimx.trainer.worker, slimx.cluster.place; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_a_run_with_agents_compiles_no_grammars_before_one_forces_a_tool():
    script = "import sys, slimx.extras.agents.agent, slimx.extras.agents.proxy.server; print('xgrammar' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_packages_are_mapped_by_their_records_as_by_their_files():
    found, by_files = recorded_packages(), importlib.metadata.packages_distributions()
    assert {name: sorted(found[name]) for name in by_files} == {n: sorted(packages) for n, packages in by_files.items()}
    # A record may name files that were never installed, such as those of packages inside of setuptools.
    assert [name for name in found.keys() - by_files.keys() if importlib.util.find_spec(name) is not None] == []
