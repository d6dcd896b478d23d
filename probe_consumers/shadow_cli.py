"""`undercurrent probe shadow`: what a candidate would have done, against the version that guards."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap, ServiceConfig
from undercurrent.counts import counted

app = typer.Typer(add_completion=False)

_LISTED = 20


@app.command()
def shadow(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the probe's binding.")],
    config: ServiceConfig,
    version: Annotated[
        str | None, typer.Option("--version", help="Candidate, by version or fingerprint; the one on trial without it.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Verdicts from this time on: ISO 8601, or Unix seconds.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Verdicts before this time.")] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Label that says who is positive; the only one there is without it.")
    ] = None,
    service: Annotated[
        str | None, typer.Option("--service", help="Consumer group whose verdicts count; the configuration's without.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with every request on which they differ.")
    ] = False,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Compare a candidate that ran beside the deployed version with it, on the requests that both have judged.

    Where there is no candidate: what the deployed version says, for one that is in shadow itself.

    Counts and rates with exact intervals, per label where requests have labels, McNemar's test, and the requests on
    which they differ. A request that the deployed version stopped before the candidate acted is told apart: what the
    candidate would have done further on, nobody knows.
    """
    from probe_consumers.__main__ import read_config
    from probe_consumers.replay_range import RangeRequest, find_range, parse_time
    from probe_consumers.replay_select import labels_on_topic
    from probe_consumers.rollout_command import bound_of
    from probe_consumers.rollout_log import read_rollouts
    from probe_consumers.shadow_command import Pairs, chosen_version, labels_for, table_of
    from undercurrent.cli.tables import write_table
    from undercurrent.errors import TopicError
    from undercurrent.evaluation.shadow import shadow_report
    from undercurrent.kafka.client import Isolation
    from undercurrent.pipeline import interactive
    from undercurrent.subjects import codec_of

    host = read_config(config, bootstrap_servers)
    bound, settings = bound_of(host, name), interactive(host.kafka)
    wanted = RangeRequest(
        since_ms=None if since is None else parse_time(since, "--since"),
        until_ms=None if until is None else parse_time(until, "--until"),
    )
    part = find_range(settings, host.plan.verdicts, wanted, Isolation.READ_COMMITTED)
    pairs = Pairs(name, service or host.group(bound.binding.point))
    pairs.take(part.read(), codec_of(settings))
    pairs = pairs.or_deployed()
    entry = read_rollouts(settings, host.plan.rollouts).in_force(name)
    candidate = None if entry is None or entry.candidate is None else entry.candidate.fingerprint
    chosen, fingerprint = chosen_version(pairs, version, candidate)
    judged, failed = pairs.judged(fingerprint)
    try:
        known = labels_on_topic(settings, host.plan.labels)
    except TopicError:  # a pipeline that was set up before there were labels
        known = {}
    called, labels = labels_for(known, (row.request_id for row in judged), label)
    report = shadow_report(judged, labels, failed)
    if as_json:
        told = {"probe": name, "version": chosen, "fingerprint": fingerprint, "label": called, **report.to_dict()}
        told["unreadable"] = asdict(pairs.passed_over)
        sys.stdout.write(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        return
    which = "the deployed version" if pairs.alone else "candidate"
    against = "nobody: no candidate has judged anything" if pairs.alone else "the deployed version"
    sys.stdout.write(f"{name}: {which} {chosen} ({fingerprint[:12]}) against {against}\n\n")
    write_table(table_of(report, alone=pairs.alone))
    if pairs.passed_over.count:
        sys.stdout.write(f"\n{pairs.passed_over.told()}\n")
    if report.failed:
        sys.stdout.write(
            f"\n{counted(report.failed, 'request')} left out: an error, or no verdict of the deployed version\n"
        )
    apart = report.disagreements
    if pairs.alone:
        ids = sorted(row.request_id for row in judged if row.candidate_acts)
        sys.stdout.write(f"\nit acts on{_more(len(ids))}: {', '.join(ids[:_LISTED]) or 'none'}\n")
    elif apart:
        sys.stdout.write(f"\nthey differ on {counted(len(apart), 'request')}{_more(len(apart))}:\n")
        columns = ("request_id", "label", "deployed_acts", "candidate_acts", "deployed_score", "candidate_score")
        write_table([{column: row[column] for column in columns} for row in apart[:_LISTED]])


def _more(count: int) -> str:
    return f", {_LISTED} of them here, all with --json" if count > _LISTED else ""
