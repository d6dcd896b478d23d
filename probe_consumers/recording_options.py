"""What of recorded topics a command reads, as options: the same for `dataset export` and for what takes topics."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile, Prefix
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from probe_consumers.dataset_export import ExportOrder
    from probe_consumers.recorded import TopicRange

TOPIC = "topic:"
OWN_GROUPS = "request_id"
SOURCE_HELP = "Folder of a dataset, or topic:POINT for what is recorded at an extraction point."


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Which requests of the topics, and how they are split."""

    since: Annotated[
        str | None, typer.Option("--since", help="Records appended from this time on: ISO 8601, or Unix seconds.")
    ] = None
    until: Annotated[str | None, typer.Option("--until", help="Records appended before this time.")] = None
    from_offset: Annotated[
        list[str] | None, typer.Option("--from-offset", help="First offset, or PARTITION:OFFSET; may be repeated.")
    ] = None
    request: Annotated[list[str] | None, typer.Option("--request", help="Only this request; may be repeated.")] = None
    group_by: Annotated[
        str, typer.Option("--group-by", help="Never in two parts: request_id, tenant, or a key of prompts' metadata.")
    ] = OWN_GROUPS
    split: Annotated[str, typer.Option("--split", help="Shares of fit, threshold and test.")] = "0.6,0.2,0.2"
    test_after: Annotated[
        str | None, typer.Option("--test-after", help="Groups with a request made from this time on are the test part.")
    ] = None
    salt: Annotated[str, typer.Option("--salt", help="Another one draws another split.")] = "undercurrent"
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Leave requests in two parts whose prompts share text.")
    ] = False
    config: ConfigFile = None
    points: PointsFile = None
    prefix: Prefix = None
    bootstrap_servers: Bootstrap = None

    def topics(self, points: list[str] | None) -> TopicRange:
        """Return the topics that are meant, when a broker answers.

        Args:
            points: extraction points; all of the configuration without it.

        Raises:
            ConfigError: an option is wrong, or no point is named anywhere.
            UnreachableError: no broker answers.
        """
        # Imported here: `--help` needs neither a Kafka client nor pyarrow.
        from probe_consumers.dataset_source import KafkaSource
        from probe_consumers.recorded import TopicRange
        from undercurrent.acls import Service, topics_of
        from undercurrent.cli.planning import plan_of
        from undercurrent.pipeline import connection, interactive, permitted, read_sections

        sections = read_sections(self.config)
        plan = plan_of(sections, self.config, self.points, self.prefix)
        order = self._order(tuple(points or plan.points))
        if not order.points:
            raise ConfigError("no extraction point is named: give --points, or --config with points: FILE")
        settings = interactive(connection(sections, self.bootstrap_servers))
        # A topic that may not be read looks like one that is not there, and would be left out without a word.
        read = replace(plan, points=order.points)
        permitted(settings, Service.REPLAY, read, only={topic.name for topic in topics_of(read, Service.REPLAY)})
        return TopicRange(KafkaSource(settings), plan, order)

    def _order(self, points: tuple[str, ...]) -> ExportOrder:
        from probe_consumers.dataset_export import ExportOrder
        from probe_consumers.replay_range import RangeRequest, parse_offsets, parse_time
        from undercurrent.evaluation.dataset_split import SplitRule, parse_shares

        return ExportOrder(
            points=points,
            range=RangeRequest(
                since_ms=None if self.since is None else parse_time(self.since, "--since"),
                until_ms=None if self.until is None else parse_time(self.until, "--until"),
                offsets=parse_offsets(self.from_offset or []),
            ),
            requests=frozenset(self.request or ()),
            split=SplitRule(
                group_by=self.group_by,
                shares=parse_shares(self.split),
                salt=self.salt,
                test_after_us=None if self.test_after is None else parse_time(self.test_after, "--test-after") * 1000,
            ),
            keep_duplicates=self.keep_duplicates,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(RecordingOptions):
    """The same for a command that takes a dataset or a topic."""

    dataset: Annotated[
        Path | None,
        typer.Option("--dataset", file_okay=False, help="Keep what is read of the topic as a dataset in this folder."),
    ] = None

    offline: Annotated[
        bool,
        typer.Option("--offline", help="Ask no broker whether a request of a dataset was erased after its export."),
    ] = False

    def source(self, text: str, *, both: frozenset[str] = frozenset()) -> Path | TopicRange:
        """Return what a command's SOURCE means.

        Args:
            text: as given.
            both: options that the command takes for a dataset as well.

        Raises:
            ConfigError: it is neither a folder nor a topic, or options of the one are given with the other.
            DatasetError: a dataset holds a request that was erased since, says the broker that is configured.
            UnreachableError: no broker answers.
        """
        if text.startswith(TOPIC):
            if self.offline:
                raise ConfigError(f"--offline: goes with the folder of a dataset; {text} is read from a broker")
            if text == TOPIC:
                raise ConfigError(f"{text} names no extraction point; accepted: {TOPIC}POINT")
            return self.topics([text.removeprefix(TOPIC)])
        folder = Path(text)
        if not folder.is_dir():
            raise ConfigError(
                f"{text}: there is no such folder; accepted: the folder of a dataset, or {TOPIC}POINT for what is "
                "recorded at an extraction point"
            )
        self.check_unused(f"{text} is a dataset", both | {"config"})
        self._refuse_erased(folder)
        return folder

    def _refuse_erased(self, folder: Path) -> None:
        """Refuse a dataset that holds a request that was erased since, where a broker is there to ask."""
        from probe_consumers.dataset_erased import ask_before_reading
        from undercurrent.pipeline import connection, names_brokers, read_sections

        if self.offline:
            return
        sections = read_sections(self.config)
        if self.config is not None or names_brokers(sections, self.bootstrap_servers):
            ask_before_reading(folder, connection(sections, self.bootstrap_servers))

    def check_unused(self, instead: str, both: frozenset[str] = frozenset()) -> None:
        """Refuse options that say what to read of a topic, where none is read.

        Args:
            instead: what is read, in words.
            both: options that count all the same.

        Raises:
            ConfigError: one is given.
        """
        # The broker may come from the environment, whatever the command reads.
        counted = both | {"bootstrap_servers", "offline"}
        given = [f.name for f in fields(self) if f.name not in counted and getattr(self, f.name) != f.default]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')}: says what to read of a topic, but {instead}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingOptions(SourceOptions):
    """The same for a command that judges probes: its `--group-by` parts a dataset anew."""

    def recording(self, text: str) -> Path | TopicRange:
        """Return what a command's SOURCE means; see `source`."""
        return self.source(text, both=frozenset({"group_by"}))

    def regrouped(self, text: str) -> str | None:
        """Return the key by which a dataset's requests are grouped in place of its own groups."""
        return None if text.startswith(TOPIC) or self.group_by == OWN_GROUPS else self.group_by
