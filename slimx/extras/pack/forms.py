"""Forms of secrets, and of names of users and machines, in texts."""

from __future__ import annotations

import re

_TOKENS = (
    *("gh[pousr]_", "github_pat_", "gl(?:pat|ptt|dt|rt|cbt)-", "gsk_", "pypi-", r"pat-[a-z]{2}\d-", "sess-", "tskey-"),
    *("xox[a-z]-", "xapp-", "nvapi-", r"wandb_v\d_", "[sr]k_(?:live|test)_", "whsec_", "dop_v1_"),
    *(r"SG\.", "gl(?:sa|c)_", "shp(?:at|ss|ca|pa)_", r"ya29\.", r"hv[sbr]\.", "dapi", "lin_api_", "tvly-", "pplx-"),
    *("tgp_v1_", "xai-", "csk-", "sq0[a-z]{3}-", "AGE-SECRET-KEY-", r"EAACEdEose0cBA", "dckr_pat_", "lsv2_", "PMAK-"),
    *("NRAK-", "figd_", "ATATT3", "ATBB", "AccountKey="),
)
"""Beginnings of tokens that services issue."""
_RANDOM = (
    r"(?:(?=[a-z]*\d)(?=\d*[a-z])[a-z\d]{20,}={0,2}|(?=[A-Za-z+/]*\d)(?=[a-z\d+/]*[A-Z])(?=[A-Z\d+/]*[a-z])"
    r"[A-Za-z\d+/]{16,}={0,2})"
)
"""Letters and digits that are no words."""
_WORD = r"(?-i:(?![A-Za-z][a-z_-]*(?![\w+/=.~-])))"
"""No word follows."""
FORMS = [
    re.compile(pattern)
    for pattern in (
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]{0,20000}?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:(?:\\+[nr]|\s){1,9}[^\n]{0,80}?"
        r"(?:[\w+/=]{16,}+|(?:Proc-Type|DEK-Info|Version|Comment): [^\n\\]*+))*",
        r"(?<![A-Za-z0-9+/])(?:[A-Za-z0-9+/]{16,}+={0,2}+(?:\\+[nr]|\s)++){1,400}+"
        r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
        r"PuTTY-User-Key-File-\d:[^\n]*(?:\n(?:[A-Z][A-Za-z-]{2,20}: [^\n]*|[\w+/=]+(?=\n|\Z)))*",
        rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})(?=[A-Za-z0-9._-]{{0,200}}[0-9])[\w=/+-]{{8,}}(?:\.[\w=-]{{16,}})*",
        # Names begin with these, too; the token of Hugging Face consists of letters.
        r"(?<![A-Za-z0-9])(?:hf|api_org|npm|r8|rpa|jina|fw|secret)_(?:[A-Za-z0-9]{20,}|(?=[A-Za-z]*\d)(?=[a-z\d]*[A-Z])"
        r"(?=[A-Z\d]*[a-z])[A-Za-z0-9]{10,})|(?<![\w-])(?:key|local)-[0-9a-f]{32,}",
        r"(?<![A-Za-z0-9])SK[0-9a-f]{32}(?![A-Za-z0-9])|(?<![\w~.-])[\w~.-]{3}\dQ~[\w~.-]{31,}",
        r"(?<![A-Za-z0-9])sk-(?=[a-z_-]{0,200}[A-Z0-9])[A-Za-z0-9_-]{8,}",
        r"(?<![A-Z0-9])A(?:KIA|SIA|GPA|IDA|ROA|IPA|NPA)[A-Z0-9]{16}(?![A-Z0-9])",
        r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{30,}",
        r"(?<!\d)\d{8,10}:AA[A-Za-z0-9_-]{30,}",
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,3}",
        r"(?<![\w-])(?:eyJ|LS0tLS1CRUdJT)[A-Za-z0-9_+/-]{24,}={0,2}",
        rf"(?i)(?<=bearer ){_WORD}[^\s\"',;\\]{{4,}}",
        rf"(?i)(?<=basic ){_WORD}[A-Za-z0-9+/_-]{{8,}}={{0,2}}",
        r"(?<=://)[^\s/\"'<>:@]{0,100}:[^\s\"'<>]{1,200}(?=@[\w.\[-])",
        r"(?<=://)[^\s/\"'<>]{1,300}(?=@)",
        r"(?i)(?<=[?&;])(?:[\w.-]{0,60}(?:token|key|secret|signature|password|credential|auth|code|session)|sig|sas"
        r"|pwd|pass)=[^\s&\"'#<>\\]+",
        r"(?i)(?:(?<=hooks\.slack\.com/)|(?<=api\.telegram\.org/bot)|(?<=webhook\.office\.com/)|(?<=hc-ping\.com/)"
        r"|(?<=open\.feishu\.cn/)|(?<=open\.larksuite\.com/))"
        r"[^\s\"'<>\\]+",
        r"(?<![\w.+-])[\w.+-]{1,100}@(?!\d+\.)[\w-]{1,100}(?:\.[\w-]{1,100}){0,8}\.[A-Za-z]{2,}",
    )
]
"""Forms of secrets and of addresses of people."""
AFTER = [
    # The key of Weights & Biases has 40 hexadecimal digits, like a commit.
    re.compile(r"(?i)(wandb[^\n]{0,80}?)(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"),
    re.compile(
        r"(?<![\w-])((?:-u|--user|--proxy-user|-U)[ =]{0,8}(\\*[\"'])?[\w.@\\-]{1,100}[:%])(?(2)[^\n\"']+|[^\s\"']+)"
    ),
    re.compile(
        r"(\b(?:sshpass|login|mysql|mysqldump|redis-cli|ldap[a-z]+)\b[^\n]{0,80}? -[paw][ =]?[\"']?)(?!ort)[^\s\"']+"
    ),
    re.compile(r"(-pass(?:in|out)? pass:|\bcurl\b[^\n]{0,200}? -b[ =]?\\*[\"']?)[^\s\"']+"),
    re.compile(
        r"(?i)(\bpass(?:word|phrase|code)\b[^\n:=\"']{0,60}(\\*[\"']{1,2})[^\"'\n]{1,200}\2\s?: ?)"
        r"(?!\[removed)[^\s\"'\\]+"
    ),
    re.compile(
        r"(\blogin(?:\s|\\+n){1,20}[^\s\\]{1,100}(?:\s|\\+n){1,20}password(?:\s|\\+n){1,20})(?!\[removed)[^\s\"'\\]+"
    ),
    re.compile(r"(?i)(://[^\s\"'<>]{1,200}?/(?:(?:web)?hooks?|with/key)/)[^\s\"'<>\\]+"),
    re.compile(
        r"(?i)((?:%22|&quot;|&#34;)[\w-]{0,60}(?:token|key|secret|password|passwd|auth)(?:%22|&quot;|&#34;)\s?(?::|%3A)"
        r"\s?(?:%22|&quot;|&#34;))[^\s%&\"]+"
    ),
    re.compile(
        r"(?i)(\b(?:(?:api|access|secret|auth)[ -](?:key|token)s?|pass(?:word|phrase|wd))\b"
        r"(?: (?:is |was )?(?=\w{0,60}\d)(?=\w{8})|(?<=[yns])[:=](?!=) ?[\"'`]?"
        r"| [^\n:='\"`,;\[{\\]{0,39}(?:[:=](?!=) ?[\"'`]?|(?<!\w)\\*[\"'`](?![]}):,]))))"
        r"(?!\[removed)[^\s\"'`,)\\]+"
    ),
    re.compile(
        r"((?i:(?<![A-Za-z])(?:keys?|pass|pat|secret_id)\\*[\"']{0,2}\s?[=:](?:\s|\\+n|[\[-]){0,40}\\*[\"']{0,2}"
        r"|(?:key|token|secret|password) ))"
        rf"{_RANDOM}(?![\w+/])"
    ),
    re.compile(
        r"((?i:\bIDENTIFIED BY (?:PASSWORD )?[\"'])|\bSecret(?:Str|Bytes)\(b?\\*[\"'])(?!\*{3}|\[removed)"
        r"[^\"'\n]+?(?=\\*[\"'\n]|\Z)"
    ),
    re.compile(
        r"((?<![\w.*:/-])[\w.*-]{1,100}:(?:[56]43\d|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:"  # .pgpass of PostgreSQL
        r"|--from-literal[ =]\\*[\"']?[\w.-]{1,100}=)(?!\[removed)(?:\\+:|[^\s\"'\\])+"
    ),
]
"""Secrets that only the words before them show."""
COLOR = re.compile(r"(?:\x1b|\\{1,8}(?:(?:u00|x)1b|e))\[[\d;]*m")
"""Escape sequences of colors, which can separate a name from its value."""
HOME = re.compile(r"(?:/home/|/Users/|/users/|/var/home/|\\{1,8}Users\\{1,8})([\w.-]+)|/root(?=/|$|[\s\"':,])")
USERS = [
    re.compile(
        r"(?<![A-Za-z])(?:SUDO_|SLURM_JOB_)?(?:USER|LOGNAME|USERNAME)\\*[\"']?\s?[=:]\s?\\*[\"']{0,2}([\w.-]{3,32})"
    ),
    re.compile(r"(?i)(?<![A-Za-z])user_?name\\*[\"']?\s?[=:]\s?\\*[\"']{0,2}([\w.-]{3,32})"),
    re.compile(r"\buid=\d+\(([\w.-]+)\)"),
    re.compile(r"(?i)logged in as:? [\"']?([\w.-]{3,32})"),
    re.compile(r"(?<![\w.-])(?:ssh|scp|sftp|rsync)[ \t][^\n|;&]{0,200}?(?<![\w.+-])([A-Za-z_][\w.-]{2,31})@"),
    re.compile(r"(?<![\w./+-])([A-Za-z_][\w.-]{2,31})@(?!v\d|step|[0-9a-f]{6,40}\b)[A-Za-z][\w-]*\d[\w.-]*"),
]
"""Places where texts name users."""
HOST_NAME = r"[A-Za-z0-9](?:[\w.-]{0,200}[A-Za-z0-9])?"
MACHINES = [
    re.compile(
        r"(?<![A-Za-z_])(?:MASTER_ADDR|RAY_ADDRESS|HOSTNAME|SLURMD_NODENAME)"
        rf"(?:=|\\*[\"']: ?)\\*[\"']?(?![A-Z_]+\b)({HOST_NAME})(?![\w(])"
    ),
    re.compile(
        r"(?i)(?<![A-Za-z])(?:\w{0,40}(?:addr|address|host|hostname|node_?name|node_?list))"
        rf"\\*[\"']?\s?[=:]\s?\\*[\"']{{0,2}}(?=[\w.-]*[\d.-])({HOST_NAME})(?![\w(])"
    ),
    re.compile(
        rf"(?i)(?<![\w.-])(?:ssh|scp|rsync|ping)[ \t]+(?:-\S+[ \t]+)*(?:[\w.-]+@)?(?=[\w.-]*[\d.-])({HOST_NAME})"
    ),
    re.compile(
        rf"(?<![\w.+-])[A-Za-z_][\w.-]{{0,31}}@(?!v\d|step|[0-9a-f]{{6,40}}\b)(?=[\w.-]*[\d.-])({HOST_NAME})(?=[:\s])"
    ),
    re.compile(r"(?<![\w.-])(ip-\d+-\d+-\d+-\d+(?:\.[\w.-]+\w)?)"),
]
"""Places where texts name machines."""
URL = re.compile(
    r"(?<![A-Za-z0-9+.-])((?!hf:|file:|s3:|gs:|docker:)[a-z][a-z0-9+.-]{1,20}://(?:[^\s/@\"'<>]{0,200}@)?)"
    rf"({HOST_NAME})"
)
"""URL up to its host."""
PUBLIC = re.compile(
    r"(?i)(?:.+\.)?(?:huggingface\.co|hf\.co|github\.com|githubusercontent\.com|gitlab\.com|pypi\.org|pythonhosted\.org"
    r"|python\.org|pytorch\.org|nvidia\.com|arxiv\.org|wandb\.ai|ray\.io|readthedocs\.io|slack\.com|discord\.com"
    r"|feishu\.cn|larksuite\.com|openai\.com|anthropic\.com|google\.com|googleapis\.com|amazonaws\.com|apache\.org"
    r"|w3\.org|modelscope\.cn|docker\.io|telegram\.org|office\.com|localhost|auto|local|none|null|true|false)"
)
"""Hosts in addresses that say nothing about a machine of the user."""
IP4 = re.compile(
    r"(?i)((?:nvidia-[\w-]*|cu(?:da|dnn|blas|fft|rand|solver|sparse)\w*|nccl|version)\W{1,40})?"
    r"(?<![\w.-])(?<!==)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\w)"
)
"""Address after nothing, or version of a package after its name."""
IP6 = re.compile(
    r"(?<![\w:.])(?=[0-9A-Fa-f:]{0,39}\d)(?=[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{3,39}(?![\w:])"
)
MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
