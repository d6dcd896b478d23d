"""Secrets and texts that nothing may repeat: planted, then looked for in everything that a process leaves behind.

section = canary_section(broker.settings(), tmp_path)      # the `kafka` section of a configuration file
process = start(config, environment=CANARY_ENVIRONMENT)
assert found_canaries({"log": log.read_text()}) == []

bench.send([TEXT_CANARY])                                  # as a prompt
assert found_texts({"log": log.read_text()}) == []
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from undercurrent.kafka.settings import KafkaSettings

CANARIES: Mapping[str, str] = {
    "sasl.password": "canary-pass-7f3a1c",
    "ssl.key.password": "canary-key-5d20b9",
    "sasl.oauthbearer.client.secret": "canary-token-c81e44",
}
"""Secrets of a connection that needs none of them: from a file, and from the environment."""

CANARY_ENVIRONMENT: Mapping[str, str] = {
    "CANARY_TOKEN": CANARIES["sasl.oauthbearer.client.secret"],
    "CANARY_KEY": CANARIES["ssl.key.password"],
}
"""What the processes that read such a section need in their environment."""


def canary_section(settings: KafkaSettings, folder: Path) -> dict[str, Any]:
    """Return a `kafka` section that works, and holds the secrets beside.

    Args:
        settings: the connection.
        folder: gets the file with the password.
    """
    password = folder / "password"
    password.write_text(CANARIES["sasl.password"], encoding="utf-8")
    return {
        **settings.keys(),
        "sasl.username": "undercurrent",
        "sasl.password_file": str(password),
        "ssl.key.password": "${CANARY_KEY}",
        "sasl.oauthbearer.client.secret": "${CANARY_TOKEN}",
    }


def found_canaries(texts: Mapping[str, str | bytes]) -> list[str]:
    """Return where secrets stand, and which.

    Args:
        texts: by what they are; none may be empty, since nothing would be looked for in it.

    Raises:
        ValueError: one is empty.
    """
    if empty := [name for name, text in texts.items() if not text]:
        raise ValueError(f"nothing to look into: {', '.join(empty)}")
    found = []
    for name, text in texts.items():
        data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        found += [f"{key} in {name}" for key, secret in CANARIES.items() if secret.encode() in data]
    return found


TEXT_CANARY = "Zaunkönig-91f3 quietly said"
"""A text that somebody wrote, or a model generated."""


def text_forms(text: str = TEXT_CANARY, tokens: Sequence[int] | None = None) -> dict[str, bytes]:
    """Return a text in every form in which a careless line would repeat it, by what the form is.

    Args:
        text: it.
        tokens: it as token ids; of the scripted engine, which is the default, each is a byte.
    """
    data = text.encode()
    tokens = data if tokens is None else tokens
    # Aligned to the groups of three bytes inside, whatever stands before.
    coded = {
        f"base64+{shift}": base64.b64encode(data[shift : shift + (len(data) - shift) // 3 * 3]) for shift in range(3)
    }
    return {
        "text": data,
        "JSON": json.dumps(text)[1:-1].encode(),
        "bytes": repr(data)[2:-1].encode(),
        "hex": data.hex().encode(),
        "token ids": ", ".join(map(str, tokens)).encode(),
        "token ids, close": ",".join(map(str, tokens)).encode(),
        "array": " ".join(map(str, tokens[:12])).encode(),
        "int32": b"".join(token.to_bytes(4, "little") for token in tokens),
        **coded,
    }


def found_texts(
    texts: Mapping[str, str | bytes], canary: str = TEXT_CANARY, tokens: Sequence[int] | None = None
) -> list[str]:
    """Return where a text stands, and in which form.

    Args:
        texts: by what they are; none may be empty, since nothing would be looked for in it.
        canary: the text; any ten characters of it at its start count.
        tokens: see `text_forms`.

    Raises:
        ValueError: one is empty.
    """
    if empty := [name for name, text in texts.items() if not text]:
        raise ValueError(f"nothing to look into: {', '.join(empty)}")
    forms = {**text_forms(canary, tokens), "beginning": canary[:10].encode()}
    found = []
    for name, text in texts.items():
        data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        found += [f"{form} in {name}" for form, wanted in forms.items() if wanted in data]
    return found


def command_lines(pids: Iterable[int]) -> str:
    """Return the command lines of processes, as everybody on the machine can read them.

    Args:
        pids: of the processes.
    """
    return "\n".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in pids)
