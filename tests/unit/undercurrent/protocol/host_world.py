"""What probe hosts read and write in a state machine: messages, a probe that counts, and a plain oracle."""

from __future__ import annotations

import json
import struct
from collections import Counter
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
    PublisherStarted,
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


def read_outputs(verdicts):
    """Return (signals, results, scores) in a form that does not depend on how scores were cut into watermarks."""
    signals, results, scores = Counter(), Counter(), {}
    for item in verdicts:
        name = (item.request_id, item.attempt, item.index)
        if item.kind is VerdictKind.SIGNAL:
            signals[*name, item.source_offset, item.token_pos, item.command_id] += 1
        elif item.kind is VerdictKind.RESULT:
            results[
                *name, item.source_offset, item.score, item.scored, item.missing, item.complete, item.end_reason
            ] += 1
        else:
            count = len(item.score_positions) // 4
            scores.setdefault(name, []).extend(struct.unpack(f"<{count}i", item.score_positions))
    return signals, results, scores


class PlainReader:
    """Reads one partition once, from its start, in the plainest way."""

    def __init__(self, log):
        self.signals, self.results, self.dead, self.scores = Counter(), Counter(), Counter(), {}
        self.streams = []
        for offset, message in enumerate(log):
            if message is None:
                self.dead[offset] += 1
            elif isinstance(message, PublisherStarted):
                for stream in list(self.streams):
                    engine, number = stream["writer"]
                    if engine == message.engine and number < message.incarnation:
                        self.close(stream, offset, "lost")
            else:
                self.take(offset, message)

    def take(self, offset, message):
        same = [stream for stream in self.streams if stream["request"] == message.request_id]
        own = next((stream for stream in same if stream["attempt"] == message.attempt), None)
        if isinstance(message, StreamStarted):
            alive = self.start(message, offset, same, own)
        elif own is None:
            alive = isinstance(message, StreamEnded)
        elif isinstance(message, StreamEnded) and message.reason is EndReason.LOST:
            self.close(own, offset, "lost")
            alive = True
        else:
            alive = self.of_writer(own, message) and message.shard < own["wanted"] and self.rest(own, message, offset)
        self.dead[offset] += not alive

    def of_writer(self, own, message):
        engine, incarnation = own["writer"]
        if (message.engine, message.incarnation) == own["writer"]:
            return True
        own["conflict"] = own["conflict"] or message.engine != engine or message.incarnation > incarnation
        return False

    def start(self, message, offset, same, own):
        if message.shard >= message.shards or any(stream["attempt"] > message.attempt for stream in same):
            return False
        if own is None:
            for stream in same:
                self.close(stream, offset, "superseded")
            own = {"request": message.request_id, "attempt": message.attempt, "wanted": message.shards, "shards": {}}
            own |= {
                "writer": (message.engine, message.incarnation),
                "conflict": False,
                "rewound": False,
                "dead": False,
                "voids": {},
                "said": set(),
            }
            own |= {"count": 0, "total": 0, "missing": 0, "unjoined": 0, "shown": -1}
            self.streams.append(own)
        elif not self.of_writer(own, message) or message.shard in own["shards"] or message.shards != own["wanted"]:
            return False
        shard = self.shard(own, message)
        shard["started"], shard["next"] = True, message.seq + 1
        own["missing"] += message.seq
        self.join(own, offset)
        return True

    def rest(self, own, message, offset):
        shard = self.shard(own, message)
        if isinstance(message, StreamEnded):
            if not shard["ended"]:
                shard["ended"] = True
                own["missing"] += max(0, message.seq - shard["next"])
                if sum(shard["ended"] for shard in own["shards"].values()) >= own["wanted"]:
                    self.close(own, offset, "finished", own_ends=True)
            return True
        if shard["ended"] or message.seq < shard["next"]:
            return False
        own["missing"] += message.seq - shard["next"]
        shard["next"] = message.seq + 1
        if isinstance(message, StreamInvalidated):
            if message.revision > shard["revision"]:
                self.void(own, shard, message.revision, message.first_position)
                return True
            return False
        return message.revision >= shard["revision"] and self.block(own, shard, message, offset)

    def void(self, own, shard, revision, first):
        said = own["voids"].setdefault(revision, first)
        own["rewound"] = own["rewound"] or own["shown"] >= first or said != first
        shard["revision"] = revision
        shard["last"] = min(shard["last"], first - 1)
        first_to_say = not any(later == revision for other, later in own["said"] if other != id(shard))
        own["said"].add((id(shard), revision))
        for other in own["shards"].values():
            if other is shard or (first_to_say and all(later <= revision for later in own["voids"])):
                other["rows"] = [row for row in other["rows"] if row[1] >= revision or row[0] < first]
                other["last"] = min(other["last"], first - 1) if not other["rows"] else other["rows"][-1][0]

    def block(self, own, shard, message, offset):
        position = struct.unpack("<i", message.positions)[0]
        if message.revision > shard["revision"]:
            self.void(own, shard, message.revision, own["voids"].get(message.revision, 0))
        if own["wanted"] == 1:
            if message.step == KILLER and not own["rewound"]:
                own["dead"] = True
                self.dead[offset] += 1
                words = (float(own["total"]), own["count"], 0, False, "quarantined")
                self.results[own["request"], own["attempt"], 0, offset, *words] += 1
            self.show(own, position, offset)
            return True
        if position <= shard["last"]:
            own["missing"] += 1
            return False
        if all(position < first for revision, first in own["voids"].items() if revision > message.revision):
            shard["last"] = position
            shard["rows"].append((position, message.revision))
        self.join(own, offset)
        return True

    def join(self, own, offset):
        shards = own["shards"].values()
        if own["wanted"] == 1 or sum(shard["started"] for shard in shards) < own["wanted"]:
            return
        while all(shard["rows"] for shard in shards):
            furthest = max(shard["rows"][0][0] for shard in shards)
            behind = [shard for shard in shards if shard["rows"][0][0] < furthest]
            own["unjoined"] += len(behind)
            for shard in behind or shards:
                shard["rows"].pop(0)
            if not behind:
                self.show(own, furthest, offset)
        if any(shard["ended"] and not shard["rows"] for shard in shards):
            # It has passed all that the others have without sending it; whether that is void later is their affair.
            own["unjoined"] += sum(len(shard["rows"]) for shard in shards)
            for shard in shards:
                shard["rows"].clear()

    def show(self, own, position, offset):
        if own["rewound"] or own["dead"]:
            return
        own["count"] += 1
        own["total"] += position
        own["shown"] = max(own["shown"], position)
        self.scores.setdefault((own["request"], own["attempt"], 0), []).append(position)
        if own["count"] == 3:
            name = f"{own['request']}/{own['attempt']}/{offset}"
            self.signals[own["request"], own["attempt"], 0, offset, position, name] += 1

    def shard(self, own, message):
        fresh = {"next": 0, "started": False, "ended": False, "revision": 0, "rows": [], "last": -1}
        return own["shards"].setdefault(message.shard, fresh)

    def close(self, stream, offset, reason, *, own_ends=False):
        self.streams.remove(stream)
        if stream["dead"]:
            return
        shards = stream["shards"].values()
        all_started = sum(shard["started"] for shard in shards) >= stream["wanted"]
        unjoined = stream["unjoined"] + sum(len(shard["rows"]) for shard in shards)
        harmed = stream["conflict"] or stream["rewound"] or unjoined > 0
        complete = own_ends and all_started and stream["missing"] == 0 and not harmed
        if stream["conflict"]:
            reason = "conflict"
        elif stream["rewound"] and reason == "finished":
            reason = "rewound"
        words = (float(stream["total"]), stream["count"], stream["missing"], complete, reason)
        self.results[stream["request"], stream["attempt"], 0, offset, *words] += 1
