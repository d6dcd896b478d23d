"""The whole ring on real parts: real vLLM, Apache Kafka, a probe host, and all of it killed in the middle."""

import numpy as np
import psutil
import pytest
import yaml
from transformers import AutoTokenizer

from undercurrent.kafka.client import Isolation
from undercurrent.kafka.reader import AssignedReader
from undercurrent.probes import LinearProbe
from undercurrent.protocol.generations import Ruling
from undercurrent.protocol.messages import (
    AckOutcome,
    GuardState,
    Outcome,
    ProbeHeartbeat,
    ProbeVerdict,
    StreamEnded,
    VerdictKind,
)
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.brokers import QUICK, apache_kafka
from undercurrent.testing.canaries import (
    CANARY_ENVIRONMENT,
    TEXT_CANARY,
    canary_section,
    command_lines,
    found_canaries,
    found_texts,
)
from undercurrent.testing.canary_prompts import FAILED, LETTERS, plant_texts, words_on_topics
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.testing.tiny_models import build_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.vllm, pytest.mark.faults, pytest.mark.timeout(900), pytest.mark.alone]

WIDTH, LAYER, MAX_LEN = 64, 2, 16_384
# A killed member's partitions are free after this; production leaves more time.
START_S = 240


class Ring:
    """A pipeline with a real model, its workers and its probe hosts."""

    def __init__(self, bench, model, folder):
        self.bench = bench
        self.model = model
        engine = {"kind": "vllm", "model": str(model), "check_plans": True,
                  "args": {"max_model_len": MAX_LEN, "max_num_seqs": 16, "dtype": "float32"}}  # fmt: skip
        self.worker_config = bench.configure(
            engine=engine,
            guards={"probes": ["quiet", "loud"], "wait_s": 3.0},
            kafka=canary_section(bench.settings, folder),
        )
        self.folder = folder
        self.hosts = []
        # One never acts, the other on every stream: what is stopped does not hang on what the model says.
        self._save("quiet", 1e9)
        self._save("loud", -1e9)

    def _save(self, name, threshold):
        weight = np.linspace(-1, 1, WIDTH, dtype=np.float32)
        LinearProbe.from_arrays(
            weight, 0.0, layer=LAYER, tensor_type="residual_stream", threshold=threshold, name=name
        ).save(self.folder / name)

    def start_worker(self):
        worker = self.bench.start_worker(
            self.worker_config,
            {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO", **CANARY_ENVIRONMENT},
        )
        worker.wait_ready(START_S)
        return worker

    def start_host(self, **modes):
        plan = self.bench.plan
        config = {
            "kafka": canary_section(self.bench.settings, self.folder),
            "topics": {
                "prefix": plan.prefix,
                "prompt_partitions": plan.prompt_partitions,
                "activation_partitions": plan.activation_partitions,
                "verdict_partitions": plan.verdict_partitions,
            },
            "points": "points.yaml",
            "service": {"name": "probes"},
            "from": "earliest",
            "bindings": [
                {"name": name, "point": "residual", "probe": f"./{name}", "mode": mode} for name, mode in modes.items()
            ],
        }
        path = self.folder / "host.yaml"
        path.write_text(yaml.safe_dump(config))
        host = AppProcess("probe_consumers", path, self.folder / f"host-{len(self.hosts)}.log", CANARY_ENVIRONMENT)
        self.hosts.append(host)
        return host

    def said(self, kind):
        """Return the messages of a kind on the verdicts topic."""
        topic = self.bench.plan.verdicts
        starts = {(topic, n): 0 for n in range(self.bench.plan.verdict_partitions)}
        with AssignedReader(self.bench.settings, starts, isolation=Isolation.READ_COMMITTED) as reader:
            found = [self.bench.codec.decode(record.value) for record in reader.read_to_end(30.0)]
        return [message for message in found if isinstance(message, kind)]

    def verdicts(self, *kinds):
        return [verdict for verdict in self.said(ProbeVerdict) if not kinds or verdict.kind in kinds]

    def last_words(self, ids, probe="quiet"):
        """Return, of each request, attempt and final words of a probe."""
        said = {}
        for verdict in self.verdicts(VerdictKind.RESULT, VerdictKind.ERROR):
            if verdict.request_id in ids and verdict.probe == probe:
                said.setdefault(verdict.request_id, []).append(verdict)
        return said

    def logs(self):
        return "\n".join([self.bench.logs(), *(host.log.read_text(errors="replace")[-3000:] for host in self.hosts)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model("llama", tmp_path_factory.mktemp("model"), width=WIDTH, max_len=MAX_LEN)


@pytest.fixture(scope="module")
def patient_broker():
    """Two engines, a host and a broker on few cores: one that gets no time for a while is not to be taken for dead."""
    yield from or_skip(apache_kafka(properties={"broker.session.timeout.ms": "30000"}))


@pytest.fixture
def ring(patient_broker, model, tmp_path):
    with EngineBench(patient_broker.settings(**QUICK), tmp_path, layers=(LAYER,)) as bench:
        built = Ring(bench, model, tmp_path)
        try:
            yield built
        finally:
            for host in built.hosts:
                host.close()


def test_worker_and_probe_host_killed_in_mid_generation(ring):
    """One valid final per request, one result per probe for the attempt that counts, and an abort that holds."""
    bench = ring.bench
    worker = ring.start_worker()

    # Nobody guards yet: the final says so.
    (unguarded,) = bench.send(["nobody looks"], max_tokens=4, temperature=0.0, ignore_eos=True)
    (final,) = bench.wait_finals([unguarded])[unguarded]
    assert {g.probe: g.state for g in final.guards} == {"quiet": GuardState.ABSENT, "loud": GuardState.ABSENT}

    host = ring.start_host(quiet="abort", loud="shadow")
    # A busy machine takes longer to start a host than to answer the prompts that it is to see running.
    bench.wait(lambda: any(beat.partitions for beat in ring.said(ProbeHeartbeat)), "a host that reads", 60)
    ids = bench.send(
        [f"request number {i} goes on" for i in range(8)], max_tokens=1500, temperature=0.0, ignore_eos=True
    )
    bench.wait(lambda: len(bench.between_tokens() & set(ids)) >= 4, "four requests in flight", 120)
    bench.wait(lambda: {v.request_id for v in ring.verdicts(VerdictKind.WATERMARK)} & set(ids), "scores", 60)
    host.kill()
    hit = bench.between_tokens() & set(ids)
    assert len(hit) >= 4, ring.logs()
    below = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    assert len(hit - set(bench.finals())) >= 4, "they were to be killed in mid-generation"
    assert psutil.wait_procs(below, timeout=30)[1] == [], "an engine outlived the worker that drove it"
    command = bench.abort(ids[0])

    ring.start_host(quiet="abort", loud="shadow")
    worker = ring.start_worker()
    bench.wait_finals(ids, 300)

    finals = bench.finals()
    assert {r: [f.outcome for f in finals[r]] for r in ids} == {
        r: [Outcome.ABORTED if r == ids[0] else Outcome.COMPLETED] for r in ids
    }, ring.logs()
    assert [a.outcome for a in bench.acks()[command]] == [AckOutcome.APPLIED]
    assert all(len(f.guards) == 2 for r in ids for f in finals[r])
    highest = {r: finals[r][0].attempt for r in ids}
    assert all(highest[r] > bench.starts()[r][0].attempt for r in hit)

    # The results are there a transaction after the streams' ends.
    wanted = set(ids[1:])
    for probe in ("quiet", "loud"):
        bench.wait(
            lambda probe=probe: all(
                any(v.attempt == highest[r] for v in ring.last_words(wanted, probe).get(r, ())) for r in wanted
            ),
            f"results of {probe}; {ring.logs()}",
            60,
        )
        for request_id, said in ring.last_words(wanted, probe).items():
            last = [v for v in said if v.attempt == highest[request_id]]
            assert [(v.kind, v.complete, v.missing) for v in last] == [(VerdictKind.RESULT, True, 0)]
            assert len({v.attempt for v in said}) == len(said), "one result for each attempt"
    assert {v.verdict for said in ring.last_words(wanted, "loud").values() for v in said} == {"triggered"}

    # Every score of a request that counts is there once, and none is missing.
    scored = {}
    for verdict in ring.verdicts(VerdictKind.WATERMARK):
        if verdict.request_id in wanted and verdict.attempt == highest[verdict.request_id]:
            key = (verdict.request_id, verdict.probe)
            scored.setdefault(key, []).extend(np.frombuffer(verdict.score_positions, "<i4").tolist())
    for request_id in wanted:
        stream = bench.activations()[request_id, highest[request_id]]
        assert isinstance(stream[-1], StreamEnded)
        for probe in ("quiet", "loud"):
            assert scored[request_id, probe] == list(range(stream[-1].last_pos + 1))
    # Nothing past the end that a final names, whether it was reached or the request was stopped.
    for verdict in ring.verdicts(VerdictKind.WATERMARK):
        (final,) = finals[verdict.request_id]
        if verdict.attempt == final.attempt:
            scored_to = np.frombuffer(verdict.score_positions, "<i4").max(initial=-1)
            assert scored_to < final.prompt_tokens + final.generated_tokens

    tokens = AutoTokenizer.from_pretrained(ring.model)(TEXT_CANARY)["input_ids"]
    planted = plant_texts(bench, tokens)
    finals = bench.wait_finals(planted, 120)
    assert {name for name in planted if finals[name][0].error} >= FAILED
    bench.wait(lambda: len(bench.dead_letters()) >= LETTERS, "dead letters of prompts")
    bench.wait(lambda: bench.read(bench.plan.dlq(bench.plan.activations("residual"))), "one of an activation")

    family = [worker.pid, *(child.pid for child in psutil.Process(worker.pid).children(recursive=True))]
    pages = "\n".join(worker.get(path)[1] for path in ("/metrics", "/readyz", "/livez"))
    left = {"pages": pages, "command lines": command_lines(family), **words_on_topics(bench)}
    assert worker.terminate(90) == 0, ring.logs()
    logs = {path.name: path.read_text(errors="replace") for path in ring.folder.glob("*.log") if path.stat().st_size}
    assert any("vllm" in log.lower() for log in logs.values()), "the engine's own log was to be looked into"
    assert found_canaries({**left, **logs}) == []
    assert found_texts({**left, **logs}, tokens=tokens) == []
    recorded = b"".join(record.value for record in bench.read(bench.plan.activations("residual")))
    assert "int32 in records" in found_texts({"records": recorded}, tokens=tokens), "not as it is looked for"


def test_an_abort_stops_real_generation_and_500_finished_prompts_stay_finished(patient_broker, model, tmp_path):
    with EngineBench(patient_broker.settings(**QUICK), tmp_path, layers=(LAYER,), partitions=1) as bench:
        ring = Ring(bench, model, tmp_path)
        worker = ring.start_worker()
        (open_one,) = bench.send(["open"], max_tokens=16_000, temperature=0.0, ignore_eos=True)
        bench.wait(lambda: open_one in bench.between_tokens(), "the open one to run")
        ids = bench.send(["short"] * 500, max_tokens=1, temperature=0.0)
        bench.wait_finals(ids, 240)
        assert open_one in bench.between_tokens(), "it was to be open still"
        worker.kill()
        before = len(bench.read(bench.plan.generations))
        worker = ring.start_worker()
        bench.wait(lambda: len(bench.starts()[open_one]) == 2, "the open one to run again", 120)
        host = ring.start_host(loud="abort")
        try:
            (final,) = bench.wait_finals([open_one], 120)[open_one]
            assert final.outcome is Outcome.ABORTED, ring.logs()
            assert final.abort is not None
            assert final.abort.probe == "loud"
            assert final.generated_tokens < 16_000
            after = [m for _, m in bench.messages(bench.plan.generations)[before:]]
            assert {m.request_id for m in after} == {open_one}
            assert all(len(bench.starts()[r]) == 1 for r in ids)
            ruled = [ruling for ruling, m in bench.judged() if m.request_id == open_one]
            assert ruled.count(Ruling.CLOSED) == 1
            assert worker.terminate(90) == 0, ring.logs()
            assert host.terminate(30) == 0, ring.logs()
        finally:
            host.close()
