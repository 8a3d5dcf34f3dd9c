"""Removal of secrets, and of names of users and machines, from texts that leave the machine.

Values are recognized by the name before them (`api_key=...`, `HF_TOKEN: ...`), by their form (`hf_...`, `sk-...`,
`Bearer ...`), or because a variable of this process's environment, or another file of the run, has them under such a
name. Therefore all texts are read first (`learn`), and then redacted (`text`). Machines and addresses get numbers, so
that a reader can still tell them apart."""

from __future__ import annotations

import getpass
import ipaddress
import json
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

from slimx.extras.pack.assignments import REMOVED, is_secret, without_values
from slimx.extras.pack.forms import AFTER, COLOR, FORMS, HOME, HOST_NAME, IP4, IP6, MAC, MACHINES, PUBLIC, URL, USERS
from slimx.extras.pack.secret_names import kind_of

SHORTEST = 6
"""Minimum number of characters of an environment variable's value that is also removed from texts. Shorter values, such
as 1 or true, occur in most texts."""
LEARNED = 8
"""Minimum number of characters of a value in a text that is also removed from other texts."""
LOOSE = 5
"""Minimum number of characters of a name that is also replaced next to a hyphen, a dot or an underscore."""
_ADDRESSES = ("ADDR", "ADDRESS", "ENDPOINT", "HOST", "HOSTNAME", "NODELIST", "NODENAME", "PROXY", "URI", "URL")
"""Ends of the names of variables with machines."""
_ACCOUNTS = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER")
_ADDRESS = re.compile(rf"(?:[a-z][\w+.-]*://)?(?:[^@/\s]*@)?({HOST_NAME})")
_LOCAL = ("0.0.0.0", "127.0.0.1")
_COMMON = re.compile(
    "root|users?|ubuntu|slimx|none|null|true|false|runner|conda|jenkins|builder|build|admin|docker|app|test|dev|work|"
    "worker|node|home|data|models?|server|engine|trainer|ray|torch|python|public|shared|localhost|head|main|master|"
    "driver|cluster|container|default|policy|slime|rewards?|rollouts?|actor|critic|judge|agent|loss|step|router|proxy|"
    "sglang|vllm|megatron|git|(?:engine|trainer|router|worker|rank)(?:-[a-z]{1,20})?-?\\d*|step-\\d+|\\d+"
)
"""Names that say nothing about a person or a machine, names of slimx, and words that occur elsewhere."""
_CODE = re.compile(
    r"(?:[A-Za-z_]+\d{0,2}|\d)(?:\.(?:[A-Za-z_]+\d{0,2}|\d{1,3})|\[\d*\])+|step-\d+|[\w.]*[\[({].*", re.S
)
"""Expressions of Python, keys, calls and lists: values that other texts contain for other reasons."""
_ATTRIBUTE = re.compile(
    r"(?:self|cls|\w*(?:args|config|cfg|ctx|spec|options|params|settings)|os|socket|ray)\..*"
    r"|.*\.(?:\w*_\w*|host|hostname|addr|address|ip|name|nodes?|url)"
)
"""Attribute of an object in Python."""
_TOKEN = re.compile(r"[\w.-]+")
_PIECE = re.compile(r"[^\W_]+")
_PIECES = 16
"""Maximum number of pieces of a name."""


class Redactor:
    """Redaction with the names and secret values of this process, its machine and its user, and of learned texts."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        users: Iterable[str] = (),
        hosts: Iterable[str] = (),
        paths: Mapping[str, str] | None = None,
    ) -> None:
        """Prepares the redaction. `environment`: variables whose secret values are removed, and whose machines and
        users are replaced; `users`, `hosts`: names that are replaced, in addition to those of home directories;
        `paths`: directories by their replacement."""
        self.count = 0
        """Number of values that have been removed or replaced."""
        self._values: set[str] = set()
        self._paths = sorted((paths or {}).items(), key=lambda item: len(item[1]), reverse=True)
        self._known: dict[str, str] = {}
        """Kind of each name in lowercase: "user" or "host"."""
        self._names: dict[str, str] = {}
        """Replacements of machines and addresses, which stay the same in all texts."""
        self._counts: Counter[str] = Counter()
        """Number of names of each kind, "host" or "ip"."""
        self._cleaned: dict[str, str] = {}
        """Texts of files' values without secrets; most values occur many times."""
        self._vocabulary: set[str] = set()
        """Words of keys of learned files: names that are such words are replaced only where they stand alone."""
        self._add_users(users)
        self.add_hosts(hosts)
        for name, value in environment.items():
            if is_secret(name, value):
                self._add_value(value, SHORTEST)
            if name in _ACCOUNTS:
                self._add_users([value])
            if name.upper().rpartition("_")[2] in _ADDRESSES:
                for part in value.split(","):
                    self._add_address(part.strip())

    def add_hosts(self, hosts: Iterable[str]) -> None:
        """Adds names of machines, also without their domains."""
        for host in hosts:
            if IP4.fullmatch(host) or ":" in host:
                continue
            for name in (host, host.partition(".")[0]):
                self._add_name(name, "host")

    def learn(self, text: str) -> None:
        """Collects the secret values, users and machines that `text` shows, so that `text` removes them from all
        texts."""
        text = COLOR.sub("", text)
        without_values(text, self._learn_value)
        for place in (HOME, *USERS):
            self._add_users(match[1] or "" for match in place.finditer(text))
        for place in MACHINES:
            self.add_hosts(match[1] for match in place.finditer(text) if _is_machine(match[1]))
        for match in URL.finditer(text):
            if re.search(r"[\d.-]", match[2]):  # others are replaced in URLs only
                self._add_address(match[0])

    def learn_values(self, value: object, name: str = "") -> None:
        """Collects the secrets in a value of a YAML or JSON file, as `learn` does. `name`: key of `value` itself."""
        for key, part in _items(value):
            self._vocabulary.update(re.findall("[a-z0-9]+", key.lower()))
            self.learn_values(part, name if kind_of(name) else key or name)
        if _is_scalar(value) and is_secret(name, str(value)):
            self._learn_value(str(value))

    def text(self, text: str) -> str:
        """Returns `text` without secrets, names and colors."""
        text = COLOR.sub("", text)
        for path, directory in self._paths:
            text = self._replace(re.compile(re.escape(directory) + r"(?![\w.-])"), path, text)
        for value in sorted(self._values, key=len, reverse=True):
            if value in text:
                self.count += text.count(value)
                text = text.replace(value, REMOVED)
        for form in FORMS:
            text = self._replace(form, REMOVED, text)
        text = without_values(text, self._removed)
        for form in AFTER:
            text = form.sub(self._after, text)
        text = self._replace(HOME, "~", text)
        text = _TOKEN.sub(self._without_names, text)
        text = URL.sub(self._url, text)
        text = IP4.sub(lambda match: match[0] if match[1] or match[0] in _LOCAL else self._named("ip", match[0]), text)
        text = MAC.sub(lambda match: self._named("ip", match[0]), text)
        return IP6.sub(lambda match: self._named("ip", match[0]) if _is_ip6(match[0]) else match[0], text)

    def values(self, value: object, name: str = "") -> object:
        """Returns a value of a YAML or JSON file, in which the values of keys with secret names are removed. `name`:
        key of `value` itself."""
        if not isinstance(value, bool | None) and is_secret(name, str(value)):
            self.count += 1
            return REMOVED
        if isinstance(value, dict):
            return {self.values(str(key)): self.values(part, str(key)) for key, part in value.items()}
        if isinstance(value, list):
            parts = []
            before = name
            for part in value:
                follows = isinstance(part, str) and re.search(r"\d", part)  # a pair, or a flag and its value
                parts.append(self.values(part, before if follows else name))
                before = part if isinstance(part, str) and re.fullmatch(r"[\w.-]+", part) else name
            return parts
        if isinstance(value, str):  # a file would write it with escapes
            if value not in self._cleaned:
                self._cleaned[value] = self.text(value)
            return self._cleaned[value]
        return value

    def file_name(self, name: str) -> str:
        """Returns the relative path `name` without secrets and names."""
        return "/".join(re.sub(r"[\\/\s]", "-", self.text(part)) for part in name.split("/"))

    def _add_address(self, address: str) -> None:
        """Adds the machine of a URL, or of HOST or HOST:PORT, unless it is public. The first label of a URL's host is
        added only if it looks like a machine, because it often names a service."""
        found = _ADDRESS.match(address)
        if found is None or PUBLIC.fullmatch(found[1]) or len(found[1]) < LOOSE - 1 or IP4.fullmatch(found[1]):
            return
        if "://" in address and not re.search(r"\d", found[1].partition(".")[0]):
            self._add_name(found[1], "host")
        else:
            self.add_hosts([found[1]])

    def _add_users(self, users: Iterable[str]) -> None:
        """Adds the names among `users` that can identify a person and are long enough to be replaced in texts."""
        for user in users:
            self._add_name(user, "user")

    def _add_name(self, name: str, kind: str) -> None:
        name = name.lower().strip("._-")
        if len(name) > 2 and not _COMMON.fullmatch(name):
            self._known.setdefault(name, kind)

    def _add_value(self, value: str, shortest: int) -> None:
        """Adds a secret value in all forms in which texts write it; of a value with several lines also each line."""
        for part in {value, *value.splitlines()}:
            part = part.strip()
            if len(part) >= shortest:
                escaped = json.dumps(part)[1:-1]
                forms = {part, escaped, escaped.replace("\\", "\\\\"), json.dumps(part, ensure_ascii=False)[1:-1]}
                forms |= {quote(part, safe=""), quote(part), quote_plus(part), repr(part)[1:-1]}
                forms |= {part.replace("'", "''"), part.replace("'", "'\\''"), part.replace("'", "'\"'\"'")}
                self._values |= forms

    def _learn_value(self, value: str) -> None:
        """Adds a value under a secret name, unless it could be an ordinary word or number."""
        value = value.strip("\"' \t\n")
        letters = re.search("[A-Za-z]", value)
        plain = len(value) >= LEARNED and letters and re.search(r"[^A-Za-z_-]", value) and REMOVED not in value
        if plain and not _CODE.fullmatch(value):
            self._add_value(value, LEARNED)

    def _without_names(self, match: re.Match[str]) -> str:
        """Returns a token, such as a file's name, without the users and machines in it, the longest first. A name that
        is short, or a word of keys, has to stand alone."""
        token = match[0]
        pieces = list(_PIECE.finditer(token))
        shown = ""
        end = 0
        for index, first in enumerate(pieces):
            for last in reversed(pieces[index : index + _PIECES]):
                name = token[first.start() : last.end()].lower()
                kind = self._known.get(name)
                alone = token.rstrip(".") == token[first.start() : last.end()]
                if first.start() >= end and kind and (alone or len(name) >= LOOSE and name not in self._vocabulary):
                    shown += token[end : first.start()] + self._shown(kind, name)
                    end = last.end()
        return shown + token[end:]

    def _shown(self, kind: str, name: str) -> str:
        if kind == "host":
            return self._named(kind, name)
        self.count += 1
        return "USER"

    def _replace(self, pattern: re.Pattern[str], replacement: str, text: str) -> str:
        text, count = pattern.subn(lambda match: replacement, text)
        self.count += count
        return text

    def _removed(self, value: str) -> None:
        self.count += 1

    def _after(self, match: re.Match[str]) -> str:
        self.count += 1
        return match[1] + REMOVED

    def _url(self, match: re.Match[str]) -> str:
        host = match[2].lower()
        if PUBLIC.fullmatch(host) or IP4.fullmatch(host):
            return match[0]
        return match[1] + self._named("host", host)

    def _named(self, kind: str, name: str) -> str:
        self.count += 1
        if name not in self._names:
            self._counts[kind] += 1
            shown = f"{kind}-{self._counts[kind]}"
            self._names |= {name: shown, shown: shown}  # a text can be redacted twice
        return self._names[name]


def _is_scalar(value: object) -> bool:
    return value is not None and not isinstance(value, bool | dict | list)


def _items(value: object) -> Iterable[tuple[str, object]]:
    """Returns the keys and values of a mapping, or the values of a list with "" as their keys."""
    if isinstance(value, dict):
        return [(str(key), part) for key, part in value.items()]
    return [("", part) for part in value] if isinstance(value, list) else []


def _is_machine(name: str) -> bool:
    """Returns True if `name` after "host" can be a machine, rather than an expression of Python in a traceback."""
    if len(name) < 4 or PUBLIC.fullmatch(name) or _ATTRIBUTE.fullmatch(name):
        return False
    return re.search("[A-Za-z]{2}", name) is not None


def _is_ip6(text: str) -> bool:
    """Returns True if `text` is an IPv6 address of a machine, rather than a time or the address of this machine."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def redactor_of(directory: Path, environment: Mapping[str, str]) -> Redactor:
    """Returns the redactor for the run in `directory` and this process's user and machine."""
    users = []
    for look in (getpass.getuser, directory.owner):
        try:
            users.append(look())
        except (KeyError, OSError):  # a user without an entry in the user database, or a missing directory
            continue
    paths = {"RUN": str(directory.resolve()), "~": str(Path.home())}
    return Redactor(environment, users=users, hosts=[socket.gethostname(), socket.getfqdn()], paths=paths)
