"""Names of keys, variables, flags and headers whose values are secrets, recognized by their words."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["", "token", "password"]
"""Kind of a name: not secret; a token, which can also be a number of tokens or a special token; or a password, which
can be any text."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ENDINGS = re.compile("b64|base|bytes|data|hash|headers?|plain|raw|str|string|text|value")
"""Words after the word that makes a name secret."""
_PASSWORDS = re.compile(
    "password|passwords|passwd|passphrase|passcode|pwd|secret|secrets|credential|credentials|creds|cookie|"
    "cookies|authorization|auth|dsn|otp|totp|webhook|pw|passkey|sshpass"
)
_TOKENS = re.compile("jwt|apikey|secretkey|privatekey|accesskey|sshkey|sid|sessionid|phpsessid|jsessionid")
_GLUED = re.compile(r"(?:access|api|auth|bearer|csrf|id|refresh|session|xsrf)tokens?")
_KEYS = re.compile(
    "access|account|admin|api|app|auth|client|deploy|encryption|host|license|master|private|secret|server|"
    "service|shared|signing|ssh|storage"
)
"""Words before "key" in lowercase names. Other keys in lowercase are those of mappings."""
_MANY = re.compile("access|api|auth|bearer|bot|hf|hub|id|refresh|session|user")
"""Words before "tokens". Other tokens are those of texts."""
_MODEL = re.compile(
    "a|accepted|assistant|audio|bad|begin|bos|box|by|cached|call|class|cls|completion|decoder|draft|each|end|eod|"
    "eom|eos|eot|first|forced|gen|generated|good|im|image|img|input|last|mask|max|mean|min|n|new|next|num|other|"
    "output|pad|padding|per|pos|prefix|prompt|response|role|sampled|sep|single|special|start|stop|suffix|system|"
    "the|think|tool|total|turn|unk|video|vision|word"
)
"""Words before "token" in names about a model's tokens."""
_WORKING_DIRECTORY = ("PWD", "OLDPWD")


def kind_of(name: str) -> Kind:
    """Returns the kind of the name `name`, such as password for "db_password" and "X-Auth", token for "HF_TOKEN" and
    "apiKey", and "" for "max_tokens" and "eos_token"."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and _ENDINGS.fullmatch(words[-1]):
        if words[-2:] == ["connection", "string"]:
            return "password"
        words.pop()
    if not words or name in _WORKING_DIRECTORY:
        return ""
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    if _PASSWORDS.fullmatch(last) or last.endswith(("password", "passwd", "passphrase", "secret")):
        return "password"
    if last == "url" and before == "webhook":
        return "password"
    if _TOKENS.fullmatch(last) or _GLUED.fullmatch(last):
        return "token"
    secret: object = False
    if last == "token":
        secret = not _MODEL.fullmatch(before)
    elif last == "tokens":
        secret = _MANY.fullmatch(before)
    elif last in ("key", "keys"):
        secret = _KEYS.fullmatch(before) or (last == "key" and (name.isupper() or "Key" in name))
    elif last in ("pass", "pat", "sas"):
        secret = bool(before) and (name.isupper() or before in ("db", "smtp"))
    return "token" if secret else ""
