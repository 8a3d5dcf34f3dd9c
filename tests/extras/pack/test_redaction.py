"""No secret and no name of a user or machine is left in a text; numbers, versions and commits are."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from slimx.extras.pack.redaction import Redactor
from slimx.extras.pack.secret_names import kind_of

KEY = "Zx81Qw77pLm2"
"""Part of every secret below."""
COMMIT = "8d54f9b0a1c2d3e4f5061728394a5b6c7d8e9f00"


def redactor(**environment: str) -> Redactor:
    return Redactor(environment, users=["alice", "root"], hosts=["gpu07.cluster.example"], paths={"RUN": "/data/r"})


@pytest.mark.parametrize(
    "text",
    [
        f"HF_TOKEN={KEY}",
        f"export WANDB_API_KEY='{KEY}'",
        f'"api_key": "{KEY}"',
        f"ServerArgs(api_key='{KEY}', admin_api_key='{KEY}', port=1)",
        f"ssl_keyfile_password={KEY}",
        f"password: {KEY}",
        f"db_password = {KEY}",
        f"client-secret: {KEY}",
        f"access_token={KEY}&x=1",
        f"token {{'token': '{KEY}'}}",
        f"Authorization: Bearer {KEY}",
        f"authorization: Token {KEY}",
        f"{{'Authorization': 'Basic {KEY}=='}}",
        f"curl -H 'x: Bearer {KEY}'",
        f"hf_{KEY}",
        f"the key sk-proj-{KEY} was refused",
        f"ghp_{KEY} github_pat_{KEY} xoxb-{KEY} nvapi-{KEY} wandb_v1_{KEY}",
        f"wandb: login with {COMMIT}",
        f"https://bob:{KEY}@mirror.example/simple",
        f"https://x.example/a?sig={KEY}&api_key={KEY}",
        f"https://hooks.slack.com/services/T0/B0/{KEY}",
        f"https://open.feishu.cn/open-apis/bot/v2/hook/{KEY}",
        f"-----BEGIN RSA PRIVATE KEY-----\\n{KEY}\n{KEY}\n-----END RSA PRIVATE KEY-----",
        f"eyJhbGciOiJIUzI1NiJ9.{KEY}abc.{KEY}",
        f"said {KEY} again",
        f"serve --api-key {KEY} --port 1",
        f"['--admin-api-key', '{KEY}', '--port', '1']",
        f"args:\n- --password\n- {KEY}\n",
        f"curl -u alice:{KEY} x",
        f"DB_PASS={KEY}",
        f"AccountKey={KEY};x=1",
        f"track.webhook=https://chat.example/api/{KEY}",
        f"gsk_{KEY} npm_{KEY} pypi-{KEY} r8_{KEY}",
    ],
)
def test_a_secret_is_removed(text):
    cleaned = redactor(MY_SECRET=KEY) if text.startswith("said") else redactor()
    out = cleaned.text(text)
    assert KEY not in out and COMMIT not in out and cleaned.count > 0
    assert cleaned.text(out) == out


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=512, eos_token: <|im_end|>, token=17, num_key_value_heads: 8",
        "track: {webhook: '${oc.env:SLIMX_WEBHOOK}', api_key: null, token: true}",
        f"commit {COMMIT}",
        "torch==2.11.0+cu130 nvidia-cudnn-cu13==9.10.2.21 driver 580.65.06",
        "2026-11-30 15:12:11 UTC, 0.0.0.0:1 127.0.0.1:80 localhost",
        "gap/mean 1.2e-07 perf/tokens_per_second 3164.26",
        "KeyError: 'messages'; the tokenizer of the root folder",
        "the monkey: a",
        "max_tokens: 1024, token_level: true, num_tokens_per_key: 3, eos_token: '</s>', PAD_TOKEN=[PAD], n_tokens=7",
        "image_token=5 tokens: [1, 2], key_env: SEARCH_TOKEN, loss per token: a mean",
        "c10::Error at 12:30:59, std::abc::def, sha256:ab12, model_runner.py, max@3, PWD=/data/x",
        "password: null, PASSWORD=${PASSWORD}, token=$TOKEN, secret: <unset>, cookie: ***, auth: true",
        "forward pass, per token, of Qwen3MoeForCausalLM in step-0000001.groups of Qwen3-30B-A3B",
        "https://huggingface.co/a/b, https://github.com/a/b.git, hf://datasets/a@main, http://127.0.0.1:1/x",
        "--max-tokens 512 --eos-token-id 5 --key-value-heads 8 -u 5",
        "actions/checkout@v4 vllm@abc123 Qwen@v2.5 reward@step4 a reward of git main, host: engine-actor-0",
        "claimed(host=self.host) of self, {'host': spec.host, 'node_name': node.hostname} of a spec, addr=f.my_addr f",
        "--redis-username default, /root_dir default",
        "google-auth==2.62.2, if token == 'abc':, nvidia-cudnn-cu12 9.10.2.21, cuDNN: 9.10.2.21",
        "per token -> 12.5ms/step, HF_TOKEN=<your token>, token: </s>, num_tokens | 12345678 |, tokens  1234567",
        "per-token quant with W8A8Fp8MoEMethod, forward pass Qwen3MoE30BA3BInstruct2507, pass 3/4 took, pass  1234567x",
        "API keys of a run's servers, choose 'token', 'sequence' is in secrets: {}, tokens: [], token 'a'",
        "basic configuration, the Basic training loop, a bearer token is missing, needs a bearer authentication header",
        "hf_checkpoint_step_100 hf_to_megatron_v2 fw_bw_stage_0 npm_config_v12 jina_embeddings_v3 secret_loader_v2",
        "key-value_cache_2 key-projection-layer-0 local-00000000-rank pat-matching-2-x sk-learn-compatible",
        "unexpected key: decoder_layers_0_self_attention_q, missing key: model/layers/12/mlp/experts/down_proj",
        "key=policy/actor1/optim/grad_norm, key: step-0000001-of-0000100-x, maj@16.mean",
        "boi_token: <start_of_image>, unknown token: '<tool_call>', stop token: \"</answer>\"",
        "SecretStr('**********'), api_keys:\nnext: 1\nmissing_keys:\n- model.layers.0\nunexpected keys:\n  a.b",
        "slimx/a.py:5432:grpo:INFO:began, step:5400:loss:mean:0.5, 7:543:8:9:10, port:5432:tcp",
        "#new-token: 1024, #cached-token: 12345678, token usage: 0.03, gen throughput (token/s): 123.45",
        "{%- if x %}{{- '<|im_start|>assistant\\n' }}{%- endif %}{{ bos_token }}{{ message['content'] + eos_token }}",
        f"sha256:{COMMIT} digest {COMMIT}, prompt id 3b241101-e2bb-4255-8caf-4136c566a962, cache key: 8d54f9b0",
    ],
)
def test_what_a_maintainer_needs_is_kept(text):
    cleaned = redactor()
    cleaned.learn(text)
    assert cleaned.text(text) == text


def test_code_and_common_words_are_not_learned_from_one_text_for_others():
    cleaned = redactor()
    cleaned.learn("    token = outputs.logits2\n    auth = self.config.auth_mode\nsecret: engines.0.model_path\n")
    cleaned.learn(
        "auth = step-0000001\ncookie = get(model_path[3])\n/home/policy/x /home/slime/y user: x, USER=default"
    )
    text = "outputs.logits2 self.config.auth_mode engines.0.model_path step-0000001 loss/policy slime default"
    assert cleaned.text(text) == text and cleaned.text("/home/policy/x") == "~/x"


def test_many_machines_take_linear_time():
    cleaned = redactor()
    text = "".join(f"http://node-{number}.example.org/x node-{number}\n" for number in range(20_000))
    began = time.process_time()
    cleaned.learn(text)
    shown = cleaned.text(text)
    assert time.process_time() - began < 10 and "node" not in shown and "host-20000" in shown


@pytest.mark.parametrize("file", sorted(Path("configs").rglob("*.yaml")), ids=str)
def test_a_configuration_is_kept(file):
    cleaned = redactor()
    text = file.read_text()
    cleaned.learn(text)
    cleaned.learn_values(yaml.safe_load(text))
    assert cleaned.text(text) == text and cleaned.values(yaml.safe_load(text)) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("", "eos_token max_token token_level num_tokens_per_key next_token PWD author monkey keys tokens MASTER_ADDR"),
        ("", "KeyError tokenizer RAY_AUTH_MODE api_key_env password_file key_value_heads sort_key loss_per_token pass"),
        ("token", "HF_TOKEN apiKey AccountKey x-api-key --api-key github_token accesstoken GH_PAT db_pass api_tokens"),
        ("token", "AWS_SECRET_ACCESS_KEY client-key-data JSESSIONID"),
        ("password", "PASSWORD db_password clientSecret PGPASSWORD MYSQL_PWD Proxy-Authorization Set-Cookie X-Auth"),
        ("password", "webhook_url SENTRY_DSN connection_string DB_CREDENTIALS PASSWORD2 password_hash"),
    ],
)
def test_words_tell_which_names_are_secret(kind, names):
    assert {name: kind_of(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_names_of_metrics_and_most_keys_are_not_secret():
    pages = Path("docs/metrics.md").read_text() + Path("docs/configuration.md").read_text()
    names = {*re.findall(r"`([\w./@-]+)`", pages)}
    assert len(names) > 500 and {name for name in names if kind_of(name)} == {"webhook", "token"}


@pytest.mark.parametrize(
    "text",
    [f"https://discord.com/api/webhooks/1/{KEY}", f"https://x.example/a?sig={KEY}", f"https://hc-ping.com/{KEY}"],
)
def test_the_end_of_a_line_is_kept_after_an_address(text):
    shown = redactor().text(json.dumps({"text": f'{text}\n"next": 1'}))
    assert KEY not in shown and json.loads(shown)["text"].endswith('[removed]\n"next": 1')


def test_names_of_people_and_machines_are_replaced_by_the_same_ones_everywhere():
    cleaned = redactor()
    text = "alice@gpu07 ran /home/carol/x as carol, RUN is /data/r/logs, not /data/rest; /root/.ray /root"
    cleaned.learn(text)
    text = cleaned.text(text)
    assert [word.strip(",;") for word in text.split()] == [
        *("USER@host-1", "ran", "~/x", "as", "USER", "RUN", "is", "RUN/logs", "not", "/data/rest", "~/.ray", "~")
    ]
    assert cleaned.text("gpu07.cluster.example 10.1.2.3 10.1.2.4 10.1.2.3 fe80:0:0:0:1:2:3:4") == (
        "host-2 ip-1 ip-2 ip-1 ip-3"
    )
    assert cleaned.text("mail bob.s+x@example.org, gpu07") == "mail [removed], host-1"


def test_values_of_a_file_are_removed_by_their_keys():
    values = {
        "track": {"webhook": "https://x.example/secret", "wandb": True},
        "servers": [{"headers": {"Authorization": "abc"}, "api_key": ["a", {"b": "c"}], "max_tokens": 7}],
        "env": {"HF_TOKEN": "abc", "HF_HOME": "/x"},
        "token_env": "SEARCH_TOKEN",
    }
    assert redactor().values(values) == {
        "track": {"webhook": "[removed]", "wandb": True},
        "servers": [{"headers": {"Authorization": "[removed]"}, "api_key": "[removed]", "max_tokens": 7}],
        "env": {"HF_TOKEN": "[removed]", "HF_HOME": "/x"},
        "token_env": "SEARCH_TOKEN",
    }


def test_short_values_of_variables_are_not_removed_from_texts():
    assert redactor(A_KEY="1", B_TOKEN="true", C_SECRET="").text("1 true") == "1 true"


@pytest.mark.parametrize(
    "piece",
    [".", "a", "_", "a.", "token ", "0:", "://", "- ", "key=", '"', "wandb"]
    + ["\\", "key-", "secret_", "-----BEGIN PRIVATE KEY-----", "secret=[\n", "token='a', ", "token  a", "password |"]
    + ["password='", "secret=[", "A" * 16 + "\\n", "a@b1 ", "login x", "-p ", "://a:", "a:b@", "password:\n", "--key "],
)
def test_a_long_line_takes_linear_time(piece):
    began = time.process_time()
    cleaned = redactor()
    text = piece * (200_000 // len(piece))
    cleaned.learn(text)
    cleaned.text(text)
    assert time.process_time() - began < 10
