"""Which keys of a configuration hold secrets, by their names: librdkafka's, a registry's and our own."""

from __future__ import annotations

import re

MASK = "********"

# `token.endpoint.url` says where tokens are given out; `.pem` of a certificate is public, that of a key is not.
_SECRET = re.compile(
    r"password|passphrase|secret|api_?key|token(?!s|_ids?\b|iz|\.endpoint)|credential|key\.pem$|jaas|user\.info",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """Return whether a key's name says that its value is to be shown to nobody."""
    return bool(_SECRET.search(key))
