"""Removal of secrets, and of names of users and machines, from texts that leave the machine.

Values are recognized by the name before them (`api_key=...`, `HF_TOKEN: ...`), by their form (`hf_...`, `sk-...`,
`Bearer ...`), or because a variable of this process's environment with such a name contains them. Machines and
addresses get numbers, so that a reader can still tell them apart."""

from __future__ import annotations

import getpass
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

REMOVED = "[removed]"
SHORTEST = 6
"""Minimum number of characters of an environment variable's value that is also removed from texts. Shorter values, such
as 1 or true, occur in most texts."""

_SECRET = (
    r"(?:[A-Z0-9_]{0,64}(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|DSN|_PASS)"
    r"|[A-Za-z0-9]{1,64}(?:Key|Token|Secret|Password)"
    r"|(?i:(?:[\w.-]{0,64}[_.-])?(?:api|admin|access|secret|private|auth|ssh|signing|encryption)[_-]?key"
    r"|(?:[\w.-]{0,64}[_.-])?(?:password|passwd|passphrase|pwd|secret|client[_-]?secret|credentials?|authorization|cookie|dsn)"
    r"|(?:[\w.-]{0,64}(?:api|admin|access|auth|bearer|refresh|id|session|bot|user|hub|hf)[_-]?)?token"
    r"|[\w.-]{0,64}key(?:file)?[_-]password|(?:[\w.-]{0,64}[_.-])?webhook(?:[_-]url)?))"
)
SECRET_NAME = re.compile(_SECRET)
"""Names of keys and variables whose values are removed. Names of token ids, such as eos_token, are not among them."""
_HARMLESS = re.compile(r"(?:null|none|true|false|[-+]?[\d.,]+|\$\{.*|<.*)?", re.IGNORECASE)
"""Values that are kept under such names: no value, numbers, references to the environment, and special tokens."""
_ASSIGNED = re.compile(rf"""(?<![\w.-])(["']?)({_SECRET})\1(\s*[=:]\s*)("[^"\n]*"|'[^'\n]*'|[^\s,;&"'}})\]]+)""")
_FORMS = [
    re.compile(pattern)
    for pattern in (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\:,]|-(?!----))*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
        r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{8,}",
        r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{8,}",
        r"(?<![A-Za-z0-9])(?:gh[pousr]_|github_pat_|glpat-|gsk_|npm_|pypi-|r8_|xox[a-z]-|nvapi-|wandb_v\d_)[A-Za-z0-9_-]{8,}",
        r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])",
        r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{30,}",
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
        r"(?i)(?<=bearer )[^\s\"',;]{4,}",
        r"(?i)(?<=basic )[A-Za-z0-9+/]{8,}={0,2}",
        r"(?<=://)[^\s/@\"'<>]+(?=@)",
        r"(?i)(?<=[?&])(?:[\w-]*(?:token|key|secret|signature|password|credential)|sig)=[^\s&\"'#]+",
        r"(?i)(?<=hooks\.slack\.com/)[^\s\"']+",
        r"(?i)(?<=open\.feishu\.cn/)[^\s\"']+",
        r"(?i)(?<=open\.larksuite\.com/)[^\s\"']+",
        r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}",
    )
]
"""Forms of secrets and of addresses of people."""
_AFTER = [
    # The key of Weights & Biases has 40 hexadecimal digits, like a commit.
    re.compile(r"(?i)(wandb[^\n]{0,80}?)(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"),
    re.compile(
        r"(?i)(?<![\w-])(--?[\w-]{0,64}(?:key|token|secret|password|passwd)"
        r"[\"']?(?:\n[ \t]{0,40}- |[\s,]{1,8})[\"']?)(?!-)[^\s\"',]+"
    ),
    re.compile(r"(?<![\w-])((?:-u|--user) [\"']?[\w.-]+:)[^\s\"']+"),
    re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?)[^\n\"',}]+"),
]
"""Secrets that only the words before them show."""
_HOME = re.compile(r"(?:/home/|/Users/|/var/home/)([\w.-]+)|/root(?=/|$|[\s\"':,])")
_IP4 = re.compile(r"(?<![\w.=-])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])")
_IP6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}(?::?[0-9a-f]{1,4}){1,4}(?![\w:])", re.IGNORECASE)
_CLOCK = re.compile(r"\d\d?(?::\d\d)+")
_LOCAL = ("0.0.0.0", "127.0.0.1")
_COMMON_USERS = ("root", "user", "ubuntu", "slimx")
"""User names that say nothing about a person, and words that occur elsewhere."""


class Redactor:
    """Redaction with the names and secret values of this process, its machine and its user."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        users: Iterable[str] = (),
        hosts: Iterable[str] = (),
        paths: Mapping[str, str] | None = None,
    ) -> None:
        """Prepares the redaction. `environment`: variables whose secret values are removed; `users`, `hosts`: names
        that are replaced, in addition to those of home directories; `paths`: directories by their replacement."""
        self.count = 0
        """Number of values that have been removed or replaced."""
        values = []
        for name, value in environment.items():
            if is_secret(name, value) and len(value) >= SHORTEST:
                values.append(value)
        self._values = sorted(values, key=len, reverse=True)
        self._paths = sorted((paths or {}).items(), key=lambda item: len(item[1]), reverse=True)
        self._users = _people(users)
        self._names: dict[str, str] = {}
        """Replacements of machines and addresses, which stay the same in all texts."""
        self._counts: Counter[str] = Counter()
        """Number of names of each kind, "host" or "ip"."""
        self._hosts: set[str] = set()
        self.add_hosts(hosts)

    def add_hosts(self, hosts: Iterable[str]) -> None:
        """Adds names of machines, also without their domains."""
        for host in hosts:
            if _IP4.fullmatch(host) or ":" in host:
                continue
            for name in (host, host.partition(".")[0]):
                if len(name) > 2 and name != "localhost":
                    self._hosts.add(name)

    def text(self, text: str) -> str:
        """Returns `text` without secrets and names."""
        for path, directory in self._paths:
            text = self._replace(re.compile(re.escape(directory) + r"(?![\w.-])"), path, text)
        for value in self._values:
            text = self._replace(re.compile(re.escape(value)), REMOVED, text)
        for form in _FORMS:
            text = self._replace(form, REMOVED, text)
        for form in _AFTER:
            text = form.sub(self._after, text)
        text = _ASSIGNED.sub(self._assigned, text)
        self._users |= _people(match[1] or "" for match in _HOME.finditer(text))
        text = self._replace(_HOME, "~", text)
        for user in sorted(self._users, key=len, reverse=True):
            text = self._replace(re.compile(rf"(?<![\w.-]){re.escape(user)}(?![\w-])"), "USER", text)
        for host in sorted(self._hosts, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", lambda match: self._named("host", match[0]), text)
        text = _IP4.sub(lambda match: match[0] if match[0] in _LOCAL else self._named("ip", match[0]), text)
        return _IP6.sub(lambda match: match[0] if _CLOCK.fullmatch(match[0]) else self._named("ip", match[0]), text)

    def values(self, value: object, name: str = "") -> object:
        """Returns a value of a YAML or JSON file, in which the values of keys with secret names are removed. `name`:
        key of `value` itself."""
        if isinstance(value, dict):
            return {str(key): self.values(part, name if is_name(name) else str(key)) for key, part in value.items()}
        if isinstance(value, list):
            return [self.values(part, name) for part in value]
        if isinstance(value, str) and is_secret(name, value):
            self.count += 1
            return REMOVED
        return value

    def _replace(self, pattern: re.Pattern[str], replacement: str, text: str) -> str:
        text, count = pattern.subn(lambda match: replacement, text)
        self.count += count
        return text

    def _assigned(self, match: re.Match[str]) -> str:
        quote, name, between, value = match.groups()
        if not is_secret(name, value.strip("\"'")) or REMOVED[:-1] in value:
            return match[0]
        self.count += 1
        mark = ""
        if value[0] in "\"'":
            mark = value[0]
        return f"{quote}{name}{quote}{between}{mark}{REMOVED}{mark}"

    def _after(self, match: re.Match[str]) -> str:
        self.count += 1
        return match[1] + REMOVED

    def _named(self, kind: str, name: str) -> str:
        self.count += 1
        if name not in self._names:
            self._counts[kind] += 1
            self._names[name] = f"{kind}-{self._counts[kind]}"
        return self._names[name]


def _people(users: Iterable[str]) -> set[str]:
    """Returns the names among `users` that can identify a person and are long enough to be replaced in texts."""
    return {user for user in users if len(user) > 2 and user not in _COMMON_USERS}


def is_name(name: str) -> bool:
    """Returns True if values under this name are removed."""
    return SECRET_NAME.fullmatch(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Returns True if `value`, the value of the key or variable `name`, is removed."""
    return is_name(name) and _HARMLESS.fullmatch(value) is None


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
