"""Into which part of a dataset a request goes: by a hash of its group, so that no group is in two parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from undercurrent.errors import ConfigError

PARTS = ("fit", "threshold", "test")


def group_hash(value: str) -> str:
    """Return what a dataset keeps of a group's name: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(value.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How requests are split.

    Args:
        group_by: `request_id`, `tenant`, or a key of the prompts' metadata.
        shares: of fit, threshold and test; they add up to 1.
        salt: another one gives another split.
        test_after_us: a group with a request made at or after this time is in test and none other is, microseconds
            since the Unix epoch; fit and threshold keep their proportion. None: test is drawn as the others are.
    """

    group_by: str = "request_id"
    shares: tuple[float, float, float] = (0.6, 0.2, 0.2)
    salt: str = "undercurrent"
    test_after_us: int | None = None

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        no_rest = self.test_after_us is not None and self.shares[0] + self.shares[1] <= 0
        if min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6 or no_rest:
            raise ConfigError(f"split {list(self.shares)}: expected shares of fit, threshold and test that add up to 1")

    def part_of(self, group: str, latest_us: int = 0) -> str:
        """Return the part of a group.

        Args:
            group: its hash, see `group_hash`.
            latest_us: when its latest request was made; looked at only under `test_after_us`.
        """
        digest = hashlib.sha256(f"{self.salt}:{group}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        fit, threshold, _ = self.shares
        if self.test_after_us is not None:
            if latest_us >= self.test_after_us:
                return "test"
            return "fit" if place < fit / (fit + threshold) else "threshold"
        if place < fit:
            return "fit"
        return "threshold" if place < fit + threshold else "test"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: what the manifest holds."""
        return {
            "group_by": self.group_by,
            "shares": dict(zip(PARTS, self.shares, strict=True)),
            "salt": self.salt,
            "test_after_us": self.test_after_us,
            "rule": "sha256(salt:group) as a share of 2^64; group is the first 16 hex digits of the name's sha256",
        }


def parse_shares(text: str) -> tuple[float, float, float]:
    """Return the shares in a text such as `0.6,0.2,0.2`.

    Raises:
        ConfigError: it has not three numbers.
    """
    try:
        fit, threshold, test = (float(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"--split {text!r}: expected shares of fit, threshold and test, as 0.6,0.2,0.2") from exc
    return fit, threshold, test
