"""What probe hosts must say of a log, by reading it once in the plainest way, and what they have said."""

from __future__ import annotations

import struct
from collections import Counter

from tests.unit.undercurrent.protocol.host_world import KILLER
from undercurrent.protocol.messages import (
    EndReason,
    PublisherStarted,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
    VerdictKind,
)


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
