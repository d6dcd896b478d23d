"""What probe hosts read and write in a state machine: messages, and a probe that counts."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Emission
from undercurrent.protocol.messages import (
    ActivationBlock,
    BindingMode,
    CommandKind,
    CommandSource,
    ControlCommand,
    EndReason,
    ProbeVerdict,
    RunState,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
    VerdictAction,
    VerdictKind,
)
from undercurrent.protocol.streams import Arrived, Closed, Limited, Opened, Withheld

POINT = "p"
PARTITIONS = (0, 1)
FINGERPRINT = "f" * 64
KILLER = 666
"""The step of a block that kills whoever looks at it."""


class DeathError(Exception):
    """A host is no more."""


def started(request, attempt, engine="e", incarnation=1, shard=0, shards=1, seq=0):
    return StreamStarted(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        shards=shards,
        engine=engine,
        incarnation=incarnation,
        seq=seq,
        prompt_len=1,
        model="m",
        tensor_type="residual_stream",
        layers=(shard,),
        width=1,
        dtype="float32",
        point_hash="",
        started_at_us=0,
    )


def block(request, attempt, position, seq, engine="e", incarnation=1, shard=0, revision=0, step=0):
    return ActivationBlock(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        engine=engine,
        incarnation=incarnation,
        tensor_type="residual_stream",
        dtype="float32",
        width=1,
        layers=(shard,),
        seq=seq,
        revision=revision,
        step=step,
        captured_at_us=0,
        positions=struct.pack("<i", position),
        token_ids=b"",
        data=struct.pack("<f", position),
    )


def invalidated(request, attempt, first, revision, seq, incarnation=1, shard=0):
    return StreamInvalidated(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        engine="e",
        incarnation=incarnation,
        seq=seq,
        first_position=first,
        revision=revision,
        invalidated_at_us=0,
    )


def ended(request, attempt, seq, engine="e", incarnation=1, shard=0, reason=EndReason.FINISHED):
    return StreamEnded(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        engine=engine,
        incarnation=incarnation,
        seq=seq,
        last_seq=max(0, seq - 1),
        last_pos=-1,
        layers=(shard,),
        emitted=(0,),
        dropped=(0,),
        reason=reason,
        ended_at_us=0,
    )


def verdict(stream, partition, offset, kind, **fields):
    return ProbeVerdict(
        request_id=stream.id.request_id,
        attempt=stream.id.attempt,
        index=stream.id.index,
        point=POINT,
        probe="probe",
        service="s",
        kind=kind,
        mode=BindingMode.ABORT,
        action=fields.pop("action", VerdictAction.CONTINUE),
        source_partition=partition,
        source_offset=offset,
        decided_at_us=0,
        **fields,
    )


class CountingRunner:
    """A probe that sums positions and aborts at the third record: its state shows every record lost or doubled."""

    def __init__(self, *, can_be_written=True):
        self.runs = {}
        self.dead = set()
        self.can_be_written = can_be_written

    def states(self, partition, stream):
        run = self.runs[partition, stream.id]
        assert run[2] == [], "what was said has been taken"
        dead = (partition, stream.id) in self.dead
        text = json.dumps([run[0], run[1], run[4], run[5], dead])
        return (RunState(probe="probe", state=text),) if self.can_be_written or dead else None

    def restore(self, partition, stream, runs, said_from):
        count, total, clear, offset, dead = json.loads(runs[0].state)
        self.runs[partition, stream.id] = [count, total, [], stream, clear, offset]
        if dead:
            self.dead.add((partition, stream.id))
        return True

    def last_word(self, key, step, reason):
        if key not in self.dead:
            self.dead.add(key)
            run = self.runs[key]
            yield from self._watermark(step.partition, run)
            yield Emission(
                verdict=verdict(
                    run[3],
                    step.partition,
                    step.offset,
                    VerdictKind.RESULT,
                    score=float(run[1]),
                    scored=run[0],
                    complete=False,
                    end_reason=reason,
                ),
                silent=step.silent,
            )

    def process(self, steps):
        for step in steps:
            key = (step.partition, step.event.stream.id)
            match step.event:
                case Opened(stream=stream):
                    self.runs[key] = [0, 0, [], stream, -1, step.offset]
                case Limited():
                    if not self.can_be_written:
                        yield from self.last_word(key, step, "rebuild_limit")
                case Withheld():
                    yield from self.last_word(key, step, "quarantined")
                case Arrived(block=item) if item.step == KILLER:
                    raise DeathError
                case Arrived() | Closed() if key in self.dead:
                    if isinstance(step.event, Closed):
                        self.dead.discard(key)
                        self.runs.pop(key)
                case Arrived(block=item, clear_up_to=clear):
                    yield from self._arrived(self.runs[key], step, item, clear)
                case Closed(stream=stream):
                    run = self.runs.pop(key)
                    yield from self._watermark(step.partition, run)
                    yield Emission(
                        verdict=verdict(
                            stream,
                            step.partition,
                            step.offset,
                            VerdictKind.RESULT,
                            score=float(run[1]),
                            scored=run[0],
                            missing=stream.missing,
                            complete=stream.complete,
                            end_reason=stream.end_reason,
                        ),
                        silent=step.silent,
                    )

    def _arrived(self, run, step, item, clear):
        position = struct.unpack("<i", item.positions)[0]
        run[0] += 1
        run[1] += position
        run[4], run[5] = clear, step.offset
        if not step.silent:
            run[2].append(position)
        if run[0] == 3:
            name = f"{item.request_id}/{item.attempt}/{step.offset}"
            command = ControlCommand(
                command_id=name,
                kind=CommandKind.ABORT,
                request_id=item.request_id,
                source=CommandSource.PROBE,
                issued_at_us=0,
            )
            said = verdict(
                run[3],
                step.partition,
                step.offset,
                VerdictKind.SIGNAL,
                action=VerdictAction.ABORT,
                token_pos=position,
                command_id=name,
            )
            yield Emission(verdict=said, command=command, timestamp_us=step.timestamp_us, silent=step.silent)

    def _watermark(self, partition, run):
        if run[2]:
            data = struct.pack(f"<{len(run[2])}i", *run[2])
            run[2] = []
            yield Emission(
                verdict=verdict(
                    run[3], partition, run[5], VerdictKind.WATERMARK, score_positions=data, clear_up_to=run[4]
                )
            )

    def watermarks(self, partition):
        for key, run in self.runs.items():
            if key[0] == partition:
                yield from (emission.verdict for emission in self._watermark(partition, run))

    def forget(self, partition):
        self.runs = {key: run for key, run in self.runs.items() if key[0] != partition}
        self.dead = {key for key in self.dead if key[0] != partition}


@dataclass
class Member:
    host: ProbeHost
    fetch_from: dict[int, int] = field(default_factory=dict)
    jumped: set[tuple[int, int]] = field(default_factory=set)
