"""Nothing that is planted into the files of a run, in forms in which secrets and names occur, reaches its archive."""

from __future__ import annotations

import json
import random
import shlex
import string
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slimx.extras.pack.archive import pack
from slimx.extras.pack.redaction import Redactor

KEPT = ("step 7 began", "loss 0.25, max_tokens=1024")
"""Lines around the secrets."""
CERTIFICATE = "-----BEGIN {0} PRIVATE KEY-----\n{1}\n{2}\n-----END {0} PRIVATE KEY-----"
LINES = [
    # variables, in shells, containers and dumps of the environment
    "HF_TOKEN={word}",
    "export WANDB_API_KEY='{word}'",
    "PASSWORD={number}",
    "DB_PASSWORD={phrase}",
    'PGPASSWORD="{quoted}"',
    "export SMTP_PASS={shell}",
    "    MYSQL_PWD={word} NCCL_DEBUG=INFO",
    "declare -x GH_PAT={word}",
    "ENV REGISTRY_PASSWORD {phrase}",
    "os.environ['ADMIN_PASSWORD'] = '{quoted1}'",
    "environ({{'HOME': '/x', 'AZURE_CLIENT_SECRET': '{word}', 'PATH': '/bin'}})",
    "SECRETS=[{word}, {number}]",
    "AWS_SECRET_ACCESS_KEY={blob}",
    "INFO cfg {{'secrets': {{'hf': '{word}', 'n': {{'deep': '{word2}'}}}}, 'x': 1}}",
    "credentials=[('bob','{word}'), ('al', '{word2}')], x",
    "client(auth=Basic('bob','{word}'))",
    "auth = Basic(\n    'bob', '{word}')",
    "x cookies={{'a': {{'b': ')', 'c': '{word}'}}}}",
    "HF_TOKEN=\\\n  {word}",
    "HF_TOKEN=<{word}> DB_PASSWORD=<{name}>",
    "token: str = '{hex}'",
    'token = """\n{word}\n"""',
    "password = '''{word}\n{word2}'''",
    "judge_key: {hex}",
    "secret_id: {word}{word2}",
    "'auth_header': '{word}'",
    "sid={word}",
    "keys:\n- {word}{word2}",
    '{{"user": "x", "pass": "{word}{word2}"}}',
    '{{\n    "name": "X_TOKEN",\n                                        "value": "{hex}"\n}}',
    "'serper_key': '{hex}'",
    "setx HF_TOKEN {hex}",
    "set -x DB_PASSWORD {name}",
    "the key id AK{aws} was refused",
    "db.example:5432:mydb:bob:{name}",
    "*:*:*:bob:{word}\\:!,{word2}",
    "api_keys:\n  openai: {name}\n  other: {word}",
    "hub_tokens: 5\napi_keys:\n- {name}\nnext: 1",
    # YAML and JSON in logs
    "password: {number}",
    "db_password: {phrase}",
    "smtp: {{user: bob, password: {word}, port: 25}}",
    "client_secret: |\n    {phrase}\n    {word}",
    "passwords:\n- {word}\n- {phrase}\nnext: 1",
    '{{"step": 1, "api_key": "{quoted}", "text": "x"}}',
    'event {{"body": "{{\\"password\\": \\"{word}\\", \\"n\\": 1}}"}}',
    '"auth_tokens": [\n  "{word}",\n  "{word2}"\n]',
    '"auths": {{"registry.example": {{"auth": "{blob}"}}}}',
    # commands
    "running: serve --api-key {word} --port 1",
    "serve --admin-password={phrase1} --port 1",
    "['sglang', '--ssl-keyfile-password', '{word}', '--tp', '2']",
    "args:\n- --password\n- {number}\n",
    "serve --api-key \\\n  {word} --port 1",
    "serve --api-key\n{word}",
    "curl -u 'bob:{password} {phrase}' x",
    "password: ${{oc.env:PW,{hex}}}",
    "ray start --head --redis-password={number}",
    "curl -u bob:{word} -H 'X-Api-Key: {word2}' https://api.wandb.ai",
    "curl --user=bob:{word} x",
    "sshpass -p {word} ssh n1",
    "mysql -u root -p{word} db",
    "machine api.wandb.ai login user password {hex}",
    "machine api.wandb.ai\n  login user\n  password {name}",
    "default login anonymous password {name}@!{name2}",
    "aws configure set aws_secret_access_key {blob}",
    "SSHPASS={name} sshpass -e ssh n1",
    "redis-cli -h n1 -a {name} ping",
    "ldapsearch -D cn=x -w {name}",
    "openssl rsa -passin pass:{name} -in k",
    "curl -b 'session={word}' x",
    "export HF_TOKEN {word}{word2}",
    "kubectl create secret generic s --from-literal=x={name} --from-literal='y={name2}'",
    "Password for 'https://bob@github.com': {name}",
    "Enter host password for user 'bob': {name}",
    "ssh -i k {user}@gpu nvidia-smi",
    # addresses
    "https://bob:{word}@mirror.example/simple",
    "postgresql://bob:p@{word}/{word2}@db.example:5432/x",
    "origin\thttps://x-access-token:{word}@github.com/o/r.git (push)",
    "redis://:{word}@cache:6379/0",
    "redis://bob:{word}/{word2}@cache:6379/0",
    "git clone https://{word}@cache/x",
    "GET /v1/a?sig={word}&access_token={word2}&x=1",
    "https://store.example/d?X-Amz-Signature={hex}&X-Amz-Credential={word}%2Fus",
    "https://hooks.slack.com/services/T0/B0/{word}",
    "https://discord.com/api/webhooks/123/{word} https://canary.discord.com/api/v9/webhooks/123/{word2}",
    "https://hooks.zapier.com/hooks/catch/1/{word}/ https://chat.example/hooks/{word2}",
    "https://maker.ifttt.com/trigger/x/with/key/{word} https://hc-ping.com/{hex}",
    "GET /login?user=bob&pass={name}&x=1",
    "GET /?x=%7B%22password%22%3A%22{name}%22%7D",
    "&quot;password&quot;:&quot;{name}&quot;",
    "Server=tcp:x;Database=d;Password={password};Encrypt=True",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={blob}==;EndpointSuffix=x",
    # headers
    "Authorization: Bearer {word}",
    "authorization: Token {word}",
    "sent x: Basic {blob}==",
    '-H \'Authorization: Digest username="bob", response="{word}"\' x',
    "{{'Authorization': 'Basic {blob}=='}}",
    "Cookie: session={word}; csrftoken={word2}",
    "< Set-Cookie: sid={word}; Path=/; HttpOnly",
    "cookies={{'session': '{word}', 'b': '{word2}'}}",
    "Proxy-Authorization: {phrase}",
    # forms of keys
    "hf_{letters} sk-proj-{word} sk-ant-api03-{word2}",
    "the token hf_{mixed} is invalid, api_org_{mixed2}",
    "sess-{letters} tskey-auth-k{word}-{word2} ATBB{letters2} key-{hex} local-{hex2}",
    "SK{half} and abc8Q~{letters}",
    "said eyJ{letters} and LS0tLS1CRUdJT{letters2}",
    "ghp_{word} github_pat_{word2} glpat-{word3} xoxb-{word4}",
    "nvapi-{word} gsk_{word2} npm_{word3} pypi-{word4} sk_live_{word5}",
    "eyJhbGciOiJIUzI1NiJ9.{word}abc.{word2}",
    "wandb: logged in with {hex}",
    "AIza{letters} 123456789:AA{letters}",
    "https://api.telegram.org/bot{word}/x https://x.webhook.office.com/{word2}",
    "https://open.larksuite.com/open-apis/bot/v2/hook/{word}",
    "PuTTY-User-Key-File-3: ssh-rsa\nPublic-Lines: 1\n{long}\nPrivate-Lines: 1\n{long2}\nPrivate-MAC: {hex}",
    "CREATE USER bob IDENTIFIED BY '{phrase}'",
    "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{hex}\n\n{long}\n{long2}",
    CERTIFICATE.format("RSA", "{long}", "{long2}"),
    CERTIFICATE.format("OPENSSH", "{long}", "{long2}").replace("\n", "\\n"),
    "{long}\n{long2}\n-----END EC PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{long}\n=abcd\n-----END PGP PRIVATE KEY BLOCK-----",
    # tracebacks
    "AuthenticationError: Incorrect API key provided: {word}. You can find yours at x",
    'OperationalError: password "{word}" of role bob was refused',
    "ServerArgs(model_path='m', api_key='{word}', admin_api_key=\"{quoted}\", port=1)",
    "    client = Client(token='{word}', timeout=3)",
    "wandb.login(key='{hex}')",
    "Settings(token=SecretStr('{name}'), other=SecretBytes(b'{phrase}'), x=1)",
    "made SecretStr('{phrase}') of it",
    "login(key='{word}{word2}')",
    # names and values in pairs
    "os.environ.setdefault('HF_TOKEN', '{hex}')",
    "os.putenv('TOGETHER_API_KEY','{hex}')",
    "[('HF_TOKEN', '{hex}'), ('PATH', '/bin')]",
    "(b'X_API_KEY', b'{hex}')",
    "| TOGETHER_API_KEY | {hex} |",
    "DB_PASSWORD -> {name}",
    "('DB_PASSWORD', '{name}')",
    "\u2502 DB_PASSWORD \u2502 {name} \u2502",
    "HF_TOKEN\t{hex}",
    "HF_TOKEN     {hex}",
    "<password>{name}</password> <user>x</user>",
    "- name: DB_PASSWORD\n  value: {name}",
    '{{"name": "HF_TOKEN", "value": "{hex}"}}',
    "{{'name': 'HF_TOKEN', 'value': '{hex}'}}",
    '{{"name":"DB_PASSWORD","value":"{name}"}}',
    "\x1b[31mpassword\x1b[0m=\x1b[32m{number}\x1b[0m",
    "ValueError: the access token {word} has expired",
    "| -----BEGIN RSA PRIVATE KEY-----\n| {long}\n| {long2}\n| -----END RSA PRIVATE KEY-----",
    "7 INFO -----BEGIN PRIVATE KEY-----\n7 INFO {long}\n7 INFO {long2}",
    # machines and people
    "(TrainerRank pid=12, ip={ip}) failed",
    "MASTER_ADDR={host} MASTER_PORT=1",
    "connecting to http://{host}.cluster.internal:8265/api",
    "ssh {user}@{host} nvidia-smi",
    "fe80::{colons} and 2001:db8::{colons2} are up",
    "cache in /mnt/home/{user}/.cache and C:\\Users\\{user2}\\x",
    "USER={user} HOSTNAME={host}",
    "uid=1000({user}) gid=1",
    "username: {user}, node_name='{host}'",
    "MASTER_ADDR={name}",
    "ping {host}",
    "root@{name}-x:~# ls",
    "logged in as {user}.",
    "mail {user}.x@corp.example",
    "worker {aws_host}.ec2.internal joined at {ip}.",
]


def planted(template: str, chance: random.Random) -> tuple[str, list[str]]:
    """Returns a text with new secrets in the places of `template`, and the secrets."""
    secrets: list[str] = []

    def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
        return "".join(chance.choices(alphabet, k=count - 2)) + "q7"

    makers: dict[str, Callable[[], str]] = {
        "word": lambda: letters(14),
        "letters": lambda: letters(34),
        "hex": lambda: "".join(chance.choices("0123456789abcdef", k=40)),
        "half": lambda: "".join(chance.choices("0123456789abcdef", k=32)),
        "mixed": lambda: "".join(chance.choices(string.ascii_letters, k=34)),
        "number": lambda: str(chance.randrange(10**9, 10**10)),
        "ip": lambda: f"10.31.{chance.randrange(100, 250)}.{chance.randrange(100, 250)}",
        "aws_host": lambda: f"ip-10-31-7-{chance.randrange(100, 250)}",
        "colons": lambda: f"{chance.randrange(100, 250)}b:a{chance.randrange(100, 250)}",
        "phrase": lambda: f"{letters(5)} {letters(6)} {letters(7)}",
        "password": lambda: f"{letters(5)},{letters(4)}@!{letters(5)}",
        "blob": lambda: letters(19) + "/+" + letters(19),
        "aws": lambda: "IA" + "".join(chance.choices(string.ascii_uppercase + string.digits, k=16)),
        "long": lambda: letters(64),
        "host": lambda: f"node{letters(8, string.ascii_lowercase)}",
        "name": lambda: "".join(chance.choices(string.ascii_lowercase, k=9)),
        "user": lambda: letters(8, string.ascii_lowercase),
    }
    values = {}
    for field in {name for _, name, _, _ in string.Formatter().parse(template) if name}:
        kind = field.rstrip("12345")
        if kind == "quoted":  # a quote inside, which the text escapes
            first, second = letters(7), letters(9)
            secrets += [first, second]
            mark = "'" if field == "quoted1" else '"'
            values[field] = f"{first}\\{mark}{second}"
        elif kind == "shell":
            first, second = letters(7), letters(9)
            secrets += [first, second]
            values[field] = shlex.quote(f"{first}'{second}")
        else:
            values[field] = makers[kind]()
            parts = values[field].replace(",", " ").split() if kind in ("phrase", "password") else [values[field]]
            secrets += parts
            if field == "phrase1":
                values[field] = shlex.quote(values[field])
    return template.format(**values), secrets


def archived(run: Path, out: Path, **environment: str) -> str:
    """Returns all names and bytes of the archive of a run, after it has read its YAML and JSON."""
    pack(run, out, 3, environment)
    with tarfile.open(out) as opened:
        parts = []
        for member in opened.getmembers():
            text = opened.extractfile(member).read().decode()
            if member.name.endswith(".jsonl"):
                assert [*map(json.loads, text.splitlines())]
            elif member.name.endswith((".json", ".yaml")):
                assert yaml.safe_load(text)
            parts += [member.name, text, repr(member.get_info())]
    return "\n".join(parts)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("slimx.extras.pack.archive.environment_lines", lambda environment: iter(()))  # takes 0.2 s
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: r}\n")
    return run


def write_everywhere(run: Path, text: str) -> None:
    """Writes `text` into the files of a run in the ways in which they contain text."""
    (run / "logs" / "trainer-0.log").write_text(f"{KEPT[0]}\n{text}\n{KEPT[1]}\n")
    (run / "alerts.jsonl").write_text(json.dumps({"time": 1.0, "kind": "failed", "text": text}) + "\n")
    (run / "summary.json").write_text(json.dumps({"steps": 1, "error": f"failed: {text}"}))
    (run / "config.yaml").write_text(yaml.safe_dump({"run": {"name": "r"}, "reward": {"options": {"a": text}}}))
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "text": text}) + "\n")


@pytest.mark.parametrize("template", LINES)
def test_a_planted_secret_is_found(template: str):
    for seed in range(3):
        text, secrets = planted(template, random.Random(f"{template}{seed}"))
        forms = [f"{KEPT[0]}\n{text}\n{KEPT[1]}\n", json.dumps({"text": text}), json.dumps(json.dumps([text]))]
        if "\n" not in text:
            forms.append(yaml.safe_dump([{"a": text}], width=10_000))
        for written in forms:
            redactor = Redactor({})
            redactor.learn(written)
            shown = redactor.text(written)
            left = [secret for secret in secrets if secret in shown]
            assert secrets and not left, (written, left)
            assert not written.startswith(KEPT) or all(text in shown for text in KEPT)


@pytest.mark.parametrize("seed", range(2))
def test_no_planted_secret_reaches_the_archive(run: Path, tmp_path: Path, seed: int):
    chance = random.Random(seed)
    made = [planted(template, chance) for template in LINES]
    chance.shuffle(made)
    write_everywhere(run, "\n".join(text for text, _ in made))
    shown = archived(run, tmp_path / "bug.tar.gz")
    assert [secret for _, secrets in made for secret in secrets if secret in shown] == []
    assert all(text in shown for text in KEPT)
