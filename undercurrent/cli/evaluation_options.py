"""Options that `probe evaluate` and `probe compare` share, and what both do before they judge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.options import check_writable
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from undercurrent.evaluation.dataset import RequestBlock
    from undercurrent.evaluation.options import Options
    from undercurrent.evaluation.request_facts import Reading
    from undercurrent.probes import LoadedProbe

PLAIN_COLUMNS = 160
"""Width of tables where there is no terminal to ask."""


class CalibrationKind(StrEnum):
    """How scores become probabilities."""

    PLATT = "platt"
    ISOTONIC = "isotonic"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """What is judged by which labels, and how the figures are made."""

    label: Annotated[str | None, typer.Option("--label", help="Name of the label that is the truth.")] = None
    label_source: Annotated[
        str | None,
        typer.Option("--source", help="Whose labels; without it what all sources say, unknown where they disagree."),
    ] = None
    point: Annotated[
        str | None, typer.Option("--point", help="Extraction point; the one that the probe takes without it.")
    ] = None
    judged_by: Annotated[
        list[str] | None,
        typer.Option(
            "--judged-by", help="A source whose labels hold although a request was cut short; all for every source."
        ),
    ] = None
    split_file: Annotated[
        Path | None,
        typer.Option(
            "--split-file", dir_okay=False, help="Split kept over datasets, by hash of group; made if it is not there."
        ),
    ] = None
    fpr: Annotated[
        list[float] | None,
        typer.Option("--fpr", help="False-positive rate to place a threshold for; 0.01 and 0.001 without it."),
    ] = None
    holdout_share: Annotated[
        float | None,
        typer.Option(
            "--holdout-share",
            min=0.0,
            help="Share of requests, by hash of id, that ran to their end in any case; as recorded without it, 0 for "
            "none.",
        ),
    ] = None
    rounds: Annotated[int, typer.Option("--rounds", min=100, help="Of the bootstrap.")] = 2000
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything drawn.")] = 0
    confidence: Annotated[float, typer.Option("--confidence", help="Of every interval.")] = 0.95
    force: Annotated[bool, typer.Option("--force", help="Replace the report that is in the folder.")] = False

    def reading(self, group_by: str | None, slices: Sequence[str] = ()) -> Reading:
        """Return how a dataset is read.

        Args:
            group_by: the key by which requests are grouped, in place of the dataset's own groups.
            slices: columns, or keys of the metadata, to report by value.

        Raises:
            ConfigError: no label is named.
        """
        from undercurrent.evaluation.request_facts import Reading

        if not self.label:
            raise ConfigError("--label: which one? `undercurrent dataset info` lists the labels of a dataset")
        return Reading(
            label=self.label,
            source=self.label_source,
            judged_by=tuple(self.judged_by or ()),
            group_by=group_by,
            holdout_share=self.holdout_share,
            slices=tuple(slices),
        )

    def options(self, reading: Reading, wanted: float | None = None, **given: object) -> Options:
        """Return the options of an evaluation.

        Args:
            reading: of the dataset.
            wanted: rate that the probe's threshold was placed for; joins the default ones.
            **given: further fields.

        Raises:
            ConfigError: a value is out of its range.
        """
        from undercurrent.evaluation.options import Options

        given |= {"rounds": self.rounds, "seed": self.seed, "confidence": self.confidence}
        targets = self.fpr or sorted({0.01, 0.001, *([wanted] if wanted else [])}, reverse=True)
        try:
            return Options(
                fpr_targets=tuple(targets), holdout_share=reading.holdout_share or None, slices=reading.slices, **given  # type: ignore[arg-type]
            )  # fmt: skip
        except ConfigError as exc:
            name, _, rest = str(exc).partition(" ")
            option = "fpr" if name == "fpr_targets" else name.replace("_", "-")
            raise ConfigError(f"--{option} {rest}") from exc


def check_out(out: Path, force: bool, name: str = "report.json") -> None:
    """Refuse to write over a report that nobody said may go, and where nothing can be written, before any work is done.

    Raises:
        ConfigError: there is one, or the folder cannot be written to.
    """
    if (out / name).exists() and not force:
        raise ConfigError(f"--out: there is a {name} in {out}; --force replaces it")
    check_writable(out, "--out")


def progress(blocks: Iterable[RequestBlock], total: int) -> Iterable[RequestBlock]:
    """Return the blocks, and show on a terminal's standard error how far they are."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return blocks
    return track(blocks, "scoring requests", total, console=console, transient=True)


def named(loaded: LoadedProbe, probe: str) -> str:
    """Return a probe's name with its version, or what it was called on the command line."""
    config = getattr(getattr(loaded.sample, "artefact", None), "config", None)
    return f"{config.name} {config.version}" if config is not None else probe


def plain_console() -> Console:
    """Return a console on standard output that is wide where there is no terminal to ask."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_COLUMNS)
