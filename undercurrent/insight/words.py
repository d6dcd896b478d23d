"""Each message of a request in a few words, and as plain data."""

from __future__ import annotations

from typing import Any

from undercurrent.counts import counted
from undercurrent.protocol.messages import (
    Accepted,
    ControlAck,
    ControlCommand,
    GenerationEvent,
    GenerationKind,
    GuardState,
    Label,
    Message,
    ProbeVerdict,
    PromptRequest,
    Released,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
    VerdictKind,
)

Said = tuple[str, str, dict[str, Any]]
_SHOWN_CHARS = 200


def said_of_message(message: Message) -> Said:
    """Return a word for a message, what it says in words, and its facts."""
    match message:
        case PromptRequest():
            return _prompt(message)
        case Accepted():
            return _accepted(message)
        case Released():
            facts = {"attempt": message.attempt, "engine": message.engine, "reason": message.reason.value}
            return "released", f"attempt {message.attempt} given up by {message.engine}: {message.reason}", facts
        case GenerationEvent():
            return _event(message)
        case ProbeVerdict():
            return _verdict(message)
        case ControlCommand():
            return _command(message)
        case ControlAck():
            return _ack(message)
        case Label():
            facts = {"name": message.name, "value": message.value.value, "source": message.source}
            return "label", f"{message.name} {message.value} by {message.source}", facts
        case _:
            return _bracket(message)


def _prompt(message: PromptRequest) -> Said:
    given = message.prompt if message.prompt is not None else counted(len(message.prompt_token_ids or ()), "token id")
    sampling = message.sampling
    settings = [f"max_tokens {sampling.max_tokens}" if sampling.max_tokens is not None else ""]
    settings += [f"n {sampling.n}" if sampling.n > 1 else "", f"tenant {message.tenant}" if message.tenant else ""]
    settings += [f"points {', '.join(message.points)}" if message.points is not None else ""]
    listed = ", ".join(filter(None, settings))
    facts = {"n": sampling.n, "max_tokens": sampling.max_tokens, "points": message.points, "tenant": message.tenant}
    return "prompt", f"{cut(given)!r}{f' ({listed})' if listed else ''}", facts


def _accepted(message: Accepted) -> Said:
    points = f", points {', '.join(message.points)}" if message.points else ", no points"
    text = f"attempt {message.attempt} by {message.engine} (start {message.incarnation}, epoch {message.epoch}){points}"
    facts = {"attempt": message.attempt, "engine": message.engine, "incarnation": message.incarnation}
    return "accepted", text, {**facts, "epoch": message.epoch, "points": list(message.points)}


def _event(message: GenerationEvent) -> Said:
    facts: dict[str, Any] = {"attempt": message.attempt, "index": message.index, "engine": message.engine}
    if message.kind is not GenerationKind.FINAL:
        return message.kind.value, message.error or f"of the prompt at offset {message.prompt_offset}", facts
    child = f", child {message.index}" if message.index else ""
    parts = [f"{message.outcome}, {counted(message.generated_tokens, 'token')}, attempt {message.attempt}{child}"]
    if message.abort is not None:
        by = message.abort.probe or message.abort.source
        parts.append(f"stopped by {by}{f': {message.abort.reason}' if message.abort.reason else ''}")
    elif message.error or message.finish_reason:
        parts.append(message.error or message.finish_reason or "")
    parts += [
        f"guard {guard.probe} {guard.state}"
        + ("" if guard.state is GuardState.COMPLETE else f" (clear up to {guard.clear_up_to})")
        for guard in message.guards
    ]
    facts |= {
        "outcome": None if message.outcome is None else message.outcome.value,
        "finish_reason": message.finish_reason,
        "generated_tokens": message.generated_tokens,
        "guards": {guard.probe: guard.state.value for guard in message.guards},
        "command_id": message.abort.command_id if message.abort else None,
    }
    return "final", ", ".join(parts), facts


def _verdict(message: ProbeVerdict) -> Said:
    facts: dict[str, Any] = {
        "attempt": message.attempt,
        "index": message.index,
        "point": message.point,
        "probe": message.probe,
        "version": message.probe_version,
        "service": message.service,
        "mode": message.mode.value,
        "action": message.action.value,
        "score": message.score,
        "token_pos": message.token_pos,
        "clear_up_to": message.clear_up_to,
    }
    score = "" if message.score is None else f", score {message.score:.4g}"
    at = "" if message.token_pos is None else f" at position {message.token_pos}"
    if message.kind is VerdictKind.SIGNAL:
        return "signal", f"{message.probe} says {message.action}{at}{score} ({message.mode})", facts
    if message.kind is VerdictKind.ERROR:
        return "error", f"{message.probe}: {message.error}", {**facts, "error": message.error}
    whole = "every record seen" if message.complete else "not complete"
    missing = f"{counted(message.missing, 'record')} missing" if message.missing else ""
    reason = message.end_reason if message.end_reason not in ("", "finished") else ""
    why = f" ({', '.join(filter(None, (reason, missing)))})" if reason or missing else ""
    word = f" {message.verdict!r}" if message.verdict else ""
    acted = "" if message.action.value == "continue" else f", {message.action}{at}"
    facts |= {"verdict": message.verdict, "complete": message.complete, "missing": message.missing}
    of = f"{message.probe}{word} on attempt {message.attempt}{_child(message.index)} at {message.point}"
    text = f"{of}{score}{acted}, {counted(message.scored, 'row')} scored, {whole}{why}"
    return "verdict", text, {**facts, "end_reason": message.end_reason}


def _command(message: ControlCommand) -> Said:
    by = message.probe or message.source.value
    at = "" if message.token_pos is None else f" at position {message.token_pos}"
    attempt = "every attempt" if message.attempt is None else f"attempt {message.attempt}"
    child = "" if message.index is None else f", child {message.index}"
    text = f"{message.kind} by {by}{at}, {attempt}{child}{f': {message.reason}' if message.reason else ''}"
    facts = {"command_id": message.command_id, "attempt": message.attempt, "probe": message.probe}
    return "command", text, {**facts, "source": message.source.value, "reason": message.reason}


def _ack(message: ControlAck) -> Said:
    facts: dict[str, Any] = {"command_id": message.command_id, "outcome": message.outcome.value}
    facts |= {"engine": message.engine, "attempt": message.attempt, "token_index": message.token_index}
    text = f"{message.outcome} by {message.engine}"
    if message.token_index is not None:
        text += f" after {counted(message.token_index, 'token')}"
    began_us = message.captured_at_us
    if began_us is not None:
        stages = {
            "published": message.published_at_us,
            "decided": message.decided_at_us,
            "received": message.received_at_us,
            "applied": message.applied_at_us,
        }
        took = {name: round((at_us - began_us) / 1000, 1) for name, at_us in stages.items() if at_us is not None}
        facts["ms_from_capture"] = took
        text += f" (ms from capture: {', '.join(f'{name} {ms:g}' for name, ms in took.items())})"
    return "ack", text, facts


def _bracket(message: Message) -> Said:
    if isinstance(message, StreamStarted):
        shard = f", shard {message.shard} of {message.shards}" if message.shards > 1 else ""
        cached = f", {message.cached_prefix} cached" if message.cached_prefix else ""
        of = f"{message.point} attempt {message.attempt}{_child(message.index)}"
        text = f"{of} by {message.engine}{shard}, {message.dtype}, "
        text += f"prompt of {counted(message.prompt_len, 'token')}{cached}"
        facts: dict[str, Any] = {"point": message.point, "attempt": message.attempt, "index": message.index}
        return "stream", text, {**facts, "engine": message.engine, "shard": message.shard, "dtype": message.dtype}
    if isinstance(message, StreamEnded):
        emitted, dropped = max(message.emitted, default=0), max(message.dropped, default=0)
        shard = f" shard {message.shard}" if message.shard else ""
        lost = f", {counted(dropped, 'row')} dropped" if dropped else ""
        why = f" ({message.detail})" if message.detail else ""
        of = f"{message.point} attempt {message.attempt}{_child(message.index)}{shard}"
        text = f"{of}: {message.reason}{why}, {counted(emitted, 'row')} written{lost}"
        facts = {"point": message.point, "attempt": message.attempt, "index": message.index, "shard": message.shard}
        return "stream end", text, {**facts, "reason": message.reason.value, "emitted": emitted, "dropped": dropped}
    if isinstance(message, StreamInvalidated):
        text = f"{message.point} attempt {message.attempt}: rows from position {message.first_position} on are void"
        return "rewound", text, {"point": message.point, "first_position": message.first_position}
    return type(message).__name__, "", {}


def _child(index: int) -> str:
    return f" child {index}" if index else ""


def cut(text: str, most: int = _SHOWN_CHARS) -> str:
    """Return a text, its end left out where it is long."""
    return text if len(text) <= most else text[: most - 4] + " ..."
