"""What a probe is trained on: one block per request, from a dataset, a topic or anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError

Positions = Literal["all", "generated", "prompt"]
TokenRule = Literal["inherit", "after-onset", "spans", "last-K"]

POSITIVE, NEGATIVE, UNKNOWN = 1, 0, -1


class Site(NamedTuple):
    """Where rows were captured.

    Args:
        tensor_type: value of a `TensorType`.
        layer: 0-based; the output of that decoder block.
    """

    tensor_type: str
    layer: int

    def __str__(self) -> str:
        return f"layer {self.layer} of {self.tensor_type}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledRequest:
    """All rows of one request. A request comes once; its rows may be memory-mapped.

    Args:
        request_id: the request.
        positions: absolute token positions, int [n], strictly increasing.
        rows: activations by site, each [n, width].
        label: what the request is; None where nobody knows, which is never taken for a negative.
        group: requests of one group never straddle a split; the request itself without one.
        prompt_len: tokens of the prompt: those before it are not generated.
        token_labels: int8 [n] of POSITIVE, NEGATIVE and UNKNOWN; each token has the request's label without it.
        sampling_probability: chance with which the request was chosen to be labelled.

    Raises:
        ProbeError: parts do not belong together; the error names request and field.
    """

    request_id: str
    positions: NDArray[np.integer]
    rows: Mapping[Site, NDArray[Any]]
    label: bool | None
    group: str | None = None
    prompt_len: int = 0
    token_labels: NDArray[np.int8] | None = None
    sampling_probability: float = 1.0

    def __post_init__(self) -> None:
        count = len(self.positions)
        if self.positions.ndim != 1 or (count > 1 and int(np.diff(self.positions).min()) < 1):
            raise self._wrong("positions", "are no line of strictly increasing numbers")
        for site, rows in self.rows.items():
            if rows.ndim != 2 or len(rows) != count:
                raise self._wrong("rows", f"at {site} are {list(rows.shape)}; accepted: [{count}, width]")
        labels = self.token_labels
        if labels is not None and (labels.shape != (count,) or not np.isin(labels, (-1, 0, 1)).all()):
            raise self._wrong("token_labels", f"accepted: [{count}] of 1 (positive), 0 (negative) and -1 (unknown)")
        if not 0 < self.sampling_probability <= 1:
            raise self._wrong("sampling_probability", f"{self.sampling_probability}; accepted: above 0, at most 1")

    def _wrong(self, field: str, what: str) -> ProbeError:
        return ProbeError(f"request {self.request_id!r}: field {field!r}: {what}")

    @property
    def group_key(self) -> str:
        """The group, or the request where it has none."""
        return self.request_id if self.group is None else self.group

    def counted(self, positions: Positions) -> NDArray[np.bool_]:
        """Return which tokens count, bool [n]."""
        generated = np.asarray(self.positions) >= self.prompt_len
        match positions:
            case "generated":
                return generated
            case "prompt":
                return ~generated
        return np.ones(len(generated), np.bool_)

    def labels_of_tokens(self) -> NDArray[np.int8]:
        """Return the label of each token, int8 [n]."""
        if self.token_labels is not None:
            return self.token_labels
        value = UNKNOWN if self.label is None else POSITIVE if self.label else NEGATIVE
        return np.full(len(self.positions), value, np.int8)

    def width_at(self, site: Site) -> int:
        """Return the width of its rows at a site.

        Raises:
            ProbeError: the block has no such site.
        """
        if site not in self.rows:
            listed = "; ".join(map(str, self.rows)) or "none"
            raise self._wrong("rows", f"{site} is missing; it has {listed}")
        return int(self.rows[site].shape[1])

    def rows_at(self, site: Site, chosen: NDArray[Any]) -> NDArray[np.float32]:
        """Return some of its rows, float32 [m, width].

        Args:
            site: where.
            chosen: indices of rows, or a mask.

        Raises:
            ProbeError: the block has no such site, or a value is not finite; the error names the token.
        """
        self.width_at(site)
        with np.errstate(invalid="ignore", over="ignore"):
            rows = np.asarray(self.rows[site][chosen]).astype(np.float32)
            told = finite(rows)
        if not told.all():
            token = int(np.asarray(self.positions)[chosen][np.argmin(told)])
            raise self._wrong("rows", f"token {token}, {site}: a value is not finite; leave the request out")
        return rows


def finite(rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which rows [n, width] have finite values alone, bool [n]: one number per row tells."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.isfinite(rows.sum(axis=1, dtype=np.float64)))


def token_labels(
    rule: TokenRule,
    positions: NDArray[np.integer],
    label: bool,
    *,
    spans: Sequence[tuple[int, int]] = (),
    last: int = 1,
) -> NDArray[np.int8]:
    """Return which tokens train, and as what, int8 [n].

    Args:
        rule: `inherit`: all, as the request. `after-onset`: a positive's from the first span's start on; those before
            are unknown. `spans`: a positive's inside a span are positive, its others negative. `last-K`: the last
            `last`, as the request; the others are unknown. A negative's tokens are negative under the first three.
        positions: absolute token positions [n].
        label: of the request.
        spans: where it shows, as (token_start, token_end), the end outside.
        last: K of `last-K`.

    Raises:
        ProbeError: the rule needs a span and the request is a positive without one, or K is less than 1.
    """
    if last < 1:
        raise ProbeError(f"last-K with K = {last}; accepted: at least 1")
    found = np.full(len(positions), POSITIVE if label else NEGATIVE, np.int8)
    if rule == "last-K":
        found[: max(0, len(positions) - last)] = UNKNOWN
        return found
    if rule == "inherit" or not label:
        return found
    if not spans:
        raise ProbeError(
            f"token labels by {rule!r} need token_start of every positive; accepted without: inherit, last-K"
        )
    if rule == "after-onset":
        found[np.asarray(positions) < min(start for start, _ in spans)] = UNKNOWN
        return found
    inside = np.zeros(len(positions), np.bool_)
    for start, end in spans:
        inside |= (np.asarray(positions) >= start) & (np.asarray(positions) < end)
    found[~inside] = NEGATIVE
    return found


def once_each(blocks: Iterable[LabelledRequest]) -> Iterator[LabelledRequest]:
    """Yield the blocks, and refuse a request that comes twice.

    Raises:
        ProbeError: naming the request.
    """
    seen: set[str] = set()
    for block in blocks:
        if block.request_id in seen:
            raise ProbeError(f"request {block.request_id!r} comes twice; accepted: one block with all of its rows")
        seen.add(block.request_id)
        yield block
