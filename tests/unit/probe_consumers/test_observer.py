"""What a probe host shows of itself: lag, heartbeats, readiness."""

from __future__ import annotations

import threading
import time

from probe_consumers.observer import Observer, Watched
from probe_consumers.versions import Versions
from tests.unit.probe_consumers.host_doubles import (
    CODEC,
    TOPIC,
    Cluster,
    Publisher,
    make_host,
    turn_until,
    whole_stream,
)
from undercurrent.errors import (
    TopicError,
)
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import ProbeHeartbeat, VerdictKind
from undercurrent.testing.streams import StreamBuilder


def watch(host):
    return Watched(host, "residual", "group", Versions(host.bounds), host._metrics)


def sample(host, name):
    return host.registry.get_sample_value(f"undercurrent_{name}", {"point": "residual", "partition": "0"})


def test_true_lag_reaches_zero_although_a_stream_holds_the_committed_offset():
    cluster = Cluster()
    with make_host(cluster) as host:
        stream = StreamBuilder("r")
        cluster.append(stream.start(), stream.block([0], [0] * 4))
        turn_until(host, lambda: cluster.verdicts())
        assert cluster.committed[0] == 0
        watched = watch(host)
        watched.see({0: cluster.end}, time.monotonic())
        assert (watched.lag_records, watched.lag_s, sample(host, "probe_lag_records")) == (0, 0.0, 0.0)
        watched.see({0: cluster.end + 7}, time.monotonic() + 2.0)
        assert (watched.lag_records, sample(host, "probe_lag_records")) == (7, 7.0)
        assert 0.0 < watched.lag_s < 60.0
        host.on_lost([Partition(TOPIC, 0)])
        host.turn()
        watched.see({}, time.monotonic())
        assert sample(host, "probe_lag_records") is None


def test_heartbeats_tell_who_guards_what_and_stop_when_the_loop_does(monkeypatch):
    cluster = Cluster()
    publisher = Publisher(cluster)
    with make_host(cluster) as host:
        watched = watch(host)
        observer = Observer([watched], host.lookup, publisher, "verdicts", CODEC, lambda: 11)
        assert observer.unready() == ["point residual: no partitions assigned yet"]
        turn_until(host, lambda: host.emitted_up_to == {0: 0})
        observer.look(watched)
        beat = CODEC.decode(publisher.waiting[-1][1])
        assert isinstance(beat, ProbeHeartbeat)
        assert (beat.service, beat.partitions, beat.partition_count, beat.sent_at_us) == ("group", (0,), 1, 11)
        assert [(item.probe, item.mode, item.point) for item in beat.probes] == [("guard", "abort", "residual")]
        assert (beat.lag_records, beat.lag_s) == (0, 0.0)
        assert observer.unready() == []
        cluster.append(*whole_stream())
        observer.look(watched)
        assert CODEC.decode(publisher.waiting[-1][1]).lag_records == 3
        monkeypatch.setattr(type(host.heartbeat), "age_s", 9.0)
        observer.look(watched)
        assert len(publisher.waiting) == 2
        assert observer.unready() == ["point residual: the loop has stood still for 9 s"]


def test_a_topic_that_is_gone_makes_the_host_unready_until_it_is_back():
    class Gone:
        def partitions(self, topic):
            raise TopicError(f"there is no topic {topic!r}")

    cluster, stop = Cluster(), threading.Event()
    with make_host(cluster) as host:
        watched, publisher = watch(host), Publisher(cluster)
        turn_until(host, lambda: host.emitted_up_to == {0: 0})
        stop.set()
        Observer([watched], Gone(), publisher, "verdicts", CODEC, lambda: 11).run(stop)
        assert watched.unready() == [f"point residual: there is no topic {TOPIC!r}"]
        Observer([watched], host.lookup, publisher, "verdicts", CODEC, lambda: 11).run(stop)
        assert watched.unready() == []


def test_a_refused_stream_makes_the_host_unready_and_says_why():
    cluster = Cluster()
    with make_host(cluster) as host:
        cluster.append(StreamBuilder("r", width=9).start())
        turn_until(host, lambda: cluster.verdicts(VerdictKind.ERROR))
        [reason] = watch(host).unready()
        assert "probe guard refuses the latest stream" in reason
        assert "width" in reason
