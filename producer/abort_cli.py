"""`undercurrent abort`: an operator stops requests, running, waiting or still to come."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile
from undercurrent.counts import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from producer.abort import Aborter
    from undercurrent.protocol.messages import ControlAck, ControlCommand

app = typer.Typer(add_completion=False)


@app.command()
def abort(
    request_ids: Annotated[list[str], typer.Argument(help="Ids of the requests to stop.", metavar="REQUEST_ID...")],
    reason: Annotated[str, typer.Option("--reason", help="Why, in words: it stands in the final of each request.")],
    index: Annotated[
        int | None, typer.Option("--index", min=0, help="One child of a request with several; without it all of them.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until an engine has said what became of it.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, help="With --wait: give up after this many seconds.")
    ] = 30.0,
    json_lines: Annotated[bool, typer.Option("--json", help="Commands and answers as JSON lines.")] = False,
    config: ConfigFile = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Stop requests: one that runs at once, one that waits without running, one that is still to come when it comes.

    The command stands on the control topic when its line is printed, whatever becomes of this process or of an engine
    worker. With --wait the exit code is 0 when every request is stopped, 1 when one was over before (too_late, stale)
    or is unknown, and 3 when no engine has answered in time.
    """
    # Imported here: `--help` needs no Kafka client.
    from producer.abort import Aborter
    from producer.cli import producer_settings
    from undercurrent.acls import Service
    from undercurrent.pipeline import permitted
    from undercurrent.topics import TopicPlan

    wanted = list(dict.fromkeys(request_ids))
    settings = producer_settings(config, bootstrap_servers)
    plan = TopicPlan(prefix=settings.prefix)
    permitted(settings.kafka, Service.OPERATOR, plan, only={plan.control, plan.acks})
    with Aborter(settings) as aborter:
        commands = []
        for request_id in wanted:
            command = aborter.send(request_id, reason=reason, index=index)
            commands.append(command)
            _show(command, f"{request_id}: command {command.command_id} is written", json_lines)
        return _answers(aborter, commands, timeout, json_lines) if wait else 0


def _answers(aborter: Aborter, commands: Collection[ControlCommand], timeout_s: float, json_lines: bool) -> int:
    """Show what became of the commands; return the exit code."""
    from undercurrent.errors import UnreachableError
    from undercurrent.protocol.messages import AckOutcome

    by_id = {command.command_id: command for command in commands}
    code, unheard, unanswered = 0, set(by_id), set(by_id)
    for ack in aborter.answers(commands, timeout_s):
        _show(ack, answer_line(by_id[ack.command_id], ack), json_lines)
        unheard.discard(ack.command_id)
        if ack.outcome is AckOutcome.UNKNOWN:
            continue
        unanswered.discard(ack.command_id)
        if ack.outcome not in (AckOutcome.APPLIED, AckOutcome.ALREADY):
            code = 1
    if unheard:
        names = ", ".join(sorted(by_id[command_id].request_id for command_id in unheard))
        raise UnreachableError(
            f"no engine has answered for {names} within {timeout_s:g} s. The commands stand: an engine that comes acts "
            "on them"
        )
    return 1 if unanswered else code


def answer_line(command: ControlCommand, ack: ControlAck) -> str:
    """Return what became of a command, in words."""
    from undercurrent.protocol.messages import AckOutcome

    attempt = "" if ack.attempt is None else f" of attempt {ack.attempt}"
    applied_ms = None if ack.applied_at_us is None else (ack.applied_at_us - command.issued_at_us) / 1000
    # By two clocks, which may differ by more than the time between.
    took = "" if applied_ms is None or applied_ms < 0 else f", {applied_ms:.0f} ms after the command"
    words = {
        AckOutcome.APPLIED: f"applied by {ack.engine} after {counted(ack.token_index or 0, 'token')}{attempt}{took}",
        AckOutcome.ALREADY: f"already stopped by another command, says {ack.engine}",
        AckOutcome.TOO_LATE: f"too late: it had ended before, says {ack.engine}",
        AckOutcome.STALE: f"stale: it was over long before, or has no such child, says {ack.engine}",
        AckOutcome.UNKNOWN: f"unknown: {ack.engine} has read every prompt and none has this id; should it come, it is "
        "stopped",
    }
    return f"{command.request_id}: {words.get(ack.outcome, f'{ack.outcome}, says {ack.engine}')}"


def _show(message: ControlCommand | ControlAck, line: str, json_lines: bool) -> None:
    if json_lines:
        from undercurrent.cli.jsonl import dumps, message_dict

        line = dumps(message_dict(message))
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
