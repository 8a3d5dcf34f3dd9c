"""The specification of one engine server, as SGLang's arguments and the process's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.engines.server.arguments import check_server_args, command_line
from slimx.engines.server.keys import STDIN, Keys
from slimx.engines.server.wire import RECEIVER
from slimx.errors import SlimxError
from slimx.layout.form import ServedForm, form_of
from slimx.layout.ranks import EngineSizes, engine_sizes
from slimx.numerics.mode import NumericsMode, mode_of
from slimx.runtime.children import python_argv
from slimx.runtime.ports import address, is_loopback
from slimx.runtime.toolkit import NVSHMEM
from slimx.runtime.user_files import private_directory


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One machine's share of a server that spans several."""

    rank: int
    """Rank of the machine; 0 answers requests."""
    count: int
    meeting: str
    """host:port on machine 0 at which the ranks meet."""
    peers: tuple[str, ...]
    """Addresses of all its machines: others are not heard."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification of one server."""

    name: str
    model_path: str
    """Hugging Face directory."""
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    port: int = 0
    """0: chosen when it starts."""
    host: str = "127.0.0.1"
    threads: int = 1
    """CPU threads of the server (CPU only)."""
    max_total_tokens: int | None = None
    """KV-cache room in tokens; None: SGLang decides."""
    numerics: NumericsMode = NumericsMode()
    """The mode of the policy's engines."""
    sizes: EngineSizes = EngineSizes()
    """The split of the model over the server's ranks."""
    seed: int = 1
    routed_experts: bool = True
    """True if the server can return each token's experts (MoE models)."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """More fields of SGLang's ServerArgs."""
    role: Literal["regular", "prefill", "decode"] = "regular"
    bootstrap_port: int | None = None
    """Port of a prefill server at which decode servers ask it for their KV."""
    frozen: bool = False
    """True if it serves a model that nothing is published to."""
    draft: bool = False
    """True if publications bring the weights of its draft model, too."""
    form: ServedForm = ServedForm()
    """The form of the weights that publications bring."""
    precompile: bool = False
    """True if DeepGEMM's kernels are compiled before it serves (CUDA only)."""
    sleeps: bool = False
    """True if its memory is given back while trainers train."""
    external: bool = False
    """True if it was started by somebody else, to whom it belongs."""
    node: NodeShare | None = None
    """None: the server is on one machine."""
    keys: Keys = field(default_factory=Keys.random, compare=False)
    """Keys that requests to the server need."""
    gpus: tuple[str, ...] | None = None
    """GPUs that the server may use, by number or UUID; None: those of the process that starts it."""

    @property
    def url(self) -> str:
        return f"http://{address(self.host, self.port)}"


def engine_spec(config: Config, group: Engines, name: str, *, device: str, moe: bool) -> EngineSpec:
    """The specification of a server `name` of `group` as the configuration has it: without address and places."""
    return EngineSpec(
        name=name,
        model_path=group.model or config.model.path,
        dtype=config.numerics.dtype,
        device=device,
        threads=group.threads,
        max_total_tokens=group.max_total_tokens,
        numerics=NumericsMode() if group.frozen else mode_of(config),
        sizes=engine_sizes(group),
        seed=config.run.seed,
        routed_experts=moe and config.rollout.routed_experts,
        sglang=group.sglang if config.track.prometheus.port is None else {"enable_metrics": True, **group.sglang},
        role=group.role,
        frozen=group.frozen,
        draft=config.publishes_draft(group),
        form=ServedForm() if group.frozen else form_of(config).served(),
        precompile=group.precompile,
        sleeps=config.schedule.colocate and not group.frozen,
    )


def server_args(spec: EngineSpec) -> dict[str, Any]:
    """SGLang's arguments for `spec`: ours, the user's, and defaults that the user may replace."""
    ours: dict[str, Any] = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "device": spec.device,
        "host": spec.host,
        "port": spec.port,
        "random_seed": spec.seed,
        "max_total_tokens": spec.max_total_tokens,
        "tp_size": spec.sizes.tensor,
        "ep_size": spec.sizes.expert,
        "pp_size": spec.sizes.pipeline,
    }
    if not spec.frozen:
        ours |= policy_args(spec)
    ours |= spec.form.server_arguments(spec.device)
    if spec.sizes.attention_data > 1:
        ours |= {"enable_dp_attention": True, "dp_size": spec.sizes.attention_data}
    if spec.sleeps and spec.device == "cuda":
        ours |= {"enable_memory_saver": True}  # without it a release frees nothing
    if spec.role != "regular":
        ours |= {"disaggregation_mode": spec.role}
    if spec.bootstrap_port is not None:
        ours |= {"disaggregation_bootstrap_port": spec.bootstrap_port}
    if spec.node is not None:
        ours |= {"nnodes": spec.node.count, "node_rank": spec.node.rank, "dist_init_addr": spec.node.meeting}
    # Events of a stream bring what is new; else each would bring all log-probs again.
    defaults: dict[str, Any] = {"log_level": "warning", "incremental_streaming_output": True}
    if not spec.sglang.get("enforce_shared_experts_fusion"):
        # SGLang decides by itself, on GPUs and for some models only; the publication plan has to know.
        defaults["disable_shared_experts_fusion"] = True
    if not spec.frozen and spec.device == "cuda" and spec.dtype == "bfloat16":
        # SGLang would round the cache of sparse attention to fp8 on Blackwell, which trainers do not.
        defaults["kv_cache_dtype"] = "bf16"
    if spec.device == "cpu" or spec.sleeps:
        # An idle or paused server would otherwise poll at full speed on a core that trainers need.
        defaults["sleep_on_idle"] = True
    if spec.device == "cpu":
        ours |= {"disable_cuda_graph": True}
        # Nothing is compiled or captured here; whether it generates is asked before it gets its first weights.
        defaults["skip_server_warmup"] = True
        # Requests whose recurrent states (delta nets) fit: else they get nearly half of the machine's memory.
        defaults["max_mamba_cache_size"] = 256
    ours |= spec.numerics.server_arguments(spec.device)
    check_server_args(spec.sglang)
    check_keyless(spec.sglang)
    if taken := sorted(ours.keys() & spec.sglang.keys()):
        raise SlimxError(
            f"rollout.engines.sglang.{taken[0]} is set by slimx ({ours[taken[0]]!r}) for engine {spec.name}; "
            "leave it out",
            code="sglang.taken",
            about=f"rollout.engines.sglang.{taken[0]}",
        )
    return defaults | spec.sglang | ours


def check_keyless(args: dict[str, Any]) -> None:
    """Refuse arguments that would show a key to every user of the machine, or serve without asking for one."""
    for name in ("api_key", "admin_api_key", "ssl_keyfile_password"):
        if args.get(name) is not None:
            raise SlimxError(
                f"rollout.engines.sglang.{name} would stand on the server's command line, which every user of the "
                "machine can read; leave it out: slimx gives each run's servers random keys",
                code="engine.key_on_command_line",
                about=name,
            )
    if args.get("tokenizer_worker_num") not in (None, 1):
        raise SlimxError(
            "rollout.engines.sglang.tokenizer_worker_num is above 1, where SGLang asks nobody for a key, so that any "
            "process could replace the weights; leave it at 1",
            code="engine.unguarded",
            about="tokenizer_worker_num",
        )


def policy_args(spec: EngineSpec) -> dict[str, Any]:
    """Arguments without which the policy could not be published to a server, nor its rollouts be trained on.

    In deterministic inference SGLang samples by the request's seed, and computes each token alike in any batch: the
    only form in which SGLang's CPU path takes seeds. With SGLang's kernels on a GPU it would cost the tuned ones and
    the custom all-reduce: there the plugin carries the seeds (slimx.adapters.sglang.hooks), to the one sampler that
    takes them.
    """
    deterministic = spec.numerics.replaces_layers or spec.device == "cpu"
    return {
        "custom_weight_loader": [RECEIVER],
        "enable_return_routed_experts": spec.routed_experts,
        **({"enable_deterministic_inference": True} if deterministic else {"sampling_backend": "pytorch"}),
    }


def server_argv(spec: EngineSpec) -> list[str]:
    """The command that runs the server in this environment's Python."""
    own = [*spec.numerics.command_line(), *spec.form.command_line(), *(["--publish-draft"] if spec.draft else [])]
    own += ["--keys", STDIN]
    return python_argv("slimx.engines.server.launch", *own, "--", *command_line(server_args(spec)))


def server_env(spec: EngineSpec) -> dict[str, str]:
    """Variables of the server process besides what it inherits. Models are directories: nothing is asked of the hub."""
    # A server's temporary files go with it (slimx.runtime.process); what torch compiles is kept for the next.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{private_directory()}/torchinductor"),
    }
    if spec.dtype == "float32":
        environment["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # else inputs of convolutions are kept in bf16
    if is_loopback(spec.host):
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo listens at the address that the machine's name stands for
    if spec.node is not None:
        # SGLang unpickles what comes to its sockets; with these it drops connections from anywhere else.
        environment["SGLANG_ZMQ_ALLOWED_PEERS"] = ",".join(dict.fromkeys(spec.node.peers))
        environment["SGLANG_ZMQ_SOURCE_IP"] = spec.host
    if spec.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if spec.sleeps:
        # SGLang gives up where one rank's GPU has a tenth less memory free than another's, as sleeping trainers leave
        # them; how much there is, `slimx plan` has counted.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if spec.device == "cuda":
        environment |= {name: value for name, value in cuda_defaults(spec).items() if name not in os.environ}
        if spec.sleeps:
            # Without it graphs stay on the GPU while trainers train; with it captured all-reduces copy their input.
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "true"
        if not spec.frozen:
            # Else rows of experts are permuted after loading, and no publication would find what it brought.
            environment["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"
    if spec.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["OMP_NUM_THREADS"] = str(spec.threads)
        if spec.sizes.world > 1:
            # SGLang's CPU path refuses several ranks on one NUMA node unless each is told its cores.
            cores, n = sorted(os.sched_getaffinity(0)), spec.threads
            shares = [[cores[(rank * n + k) % len(cores)] for k in range(n)] for rank in range(spec.sizes.world)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return environment


def cuda_defaults(spec: EngineSpec) -> dict[str, str]:
    """Variables of a server on GPUs that a user's own take the place of."""
    variables = {}
    if not spec.precompile:
        # SGLang would compile kernels for every number of tokens up to 16384, for 10 to 20 minutes by its own estimate
        # (srt/layers/deep_gemm_wrapper/compile_utils.py), before a server of fp8 weights is ready.
        variables |= {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true"}
    if spec.sglang.get("moe_a2a_backend") == "deepep":
        variables |= NVSHMEM
    return variables
