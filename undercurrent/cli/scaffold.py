"""The files of a new deployment, as text: what `undercurrent init` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

POINT = "residual"
BINDING = "loud-tokens"


def usual_layer(layers: int) -> int:
    """Return where to look first in a model: two thirds up, where what a model means is most linear."""
    return layers * 2 // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What the files are about.

    Args:
        model: absolute path of a folder, or a name on a hub.
        is_folder: which of the two.
        layer: whose output is captured.
        layers: decoder layers of the model, None where nobody looked.
    """

    model: str
    is_folder: bool
    layer: int
    layers: int | None = None

    def files(self) -> Mapping[str, str]:
        """Return the text of each file by its name."""
        return {
            "engine.yaml": _ENGINE.replace("@PIPELINE@", _PIPELINE).replace("@MODEL@", quoted(self.model)),
            "points.yaml": _POINTS.replace("@LAYER@", str(self.layer)).replace("@RANGE@", self._range()),
            "probes.yaml": _PROBES,
            "loud_tokens.py": _PROBE,
            "host.yaml": _HOST.replace("@PIPELINE@", _PIPELINE),
            "docker-compose.yml": _COMPOSE.replace("@ENGINE@", self._engine_service()),
            "README.md": _README.replace("@MODEL@", self.model),
        }

    def _range(self) -> str:
        return "`undercurrent inspect-model` shows them" if self.layers is None else f"0 to {self.layers - 1}"

    def _engine_service(self) -> str:
        if self.is_folder:
            return _MODEL_FOLDER.replace("@MODEL@", quoted(self.model))
        return _MODEL_NAME


def quoted(text: str) -> str:
    """Return a text as YAML takes it, with dollar signs that neither our files nor Compose read as a variable."""
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


_PIPELINE = """\
kafka:
  bootstrap_servers: localhost:9092     # UNDERCURRENT_BOOTSTRAP_SERVERS wins over it
topics:                                 # the same in every file of a pipeline
  prefix: undercurrent
  prompt_partitions: 4
  activation_partitions: 4
points: points.yaml
"""

_ENGINE = """\
# The engine worker, and the topics of the pipeline.
#   undercurrent topics apply --config engine.yaml
#   undercurrent engine run --config engine.yaml
# `undercurrent config check .` shows every setting with its value and where that comes from.
@PIPELINE@engine:
  name: ${ENGINE_NAME:-engine-0}        # one name per worker that runs at the same time
  kind: vllm                            # or hf: transformers, where there is no vLLM
  model: @MODEL@
  args:                                 # of vLLM's AsyncEngineArgs
    enable_prefix_caching: false        # what is read from a cache has no activations
    # On a CPU vLLM starts only where 92 % of the memory is free, unless this says how much its cache takes:
    # kv_cache_memory_bytes: 2000000000
guards:
  probes: []                            # bindings that finals wait for: name one here once its mode is flag or abort
metrics:
  port: 8080
"""

_POINTS = """\
# What is captured of each request. `undercurrent schema` prints the JSON Schema of this file.
version: 1
extraction_points:
  - name: residual
    layers: [@LAYER@]                  # @RANGE@
    tensor_type: residual_stream
    position: "*"                      # every token; generated[*] for those that the model wrote
    execution_mode: async
    queue_depth: 1024
"""

_PROBES = """\
# Which probe reads which point, and what it may do: shadow only records, flag also marks, abort also stops.
version: 1
bindings:
  - name: loud-tokens
    point: residual
    probe: loud_tokens:LoudTokens      # a class beside this file; or a folder, or a registered name
    mode: shadow
    args: {factor: 8.0}
"""

_PROBE = '''\
"""A first probe. It shows that records arrive; put one in its place that looks for what you care about."""

from __future__ import annotations

import numpy as np

from undercurrent.core import Probe, ProbeResult, ProbeSignal, RequestContext
from undercurrent.spec import ActivationRecord, ProbeKind


class LoudTokens(Probe):
    """Flags a token whose row is many times as long as those before it were on average.

    Args:
        factor: how many times.
    """

    probe_kind = ProbeKind.TRAJECTORY

    def __init__(self, factor: float = 8.0) -> None:
        self.factor = factor
        self.tokens = 0
        self.mean = 0.0
        self.loudest = 0.0

    def on_activation(self, record: ActivationRecord) -> ProbeSignal:
        """Compare one token with those before it."""
        norm = float(np.linalg.norm(np.asarray(record.tensor, np.float32)))
        if not np.isfinite(norm):
            raise ValueError(f"token {record.token_pos} has a value that is not finite")
        ratio = norm / self.mean if self.mean else 1.0
        self.tokens += 1
        self.mean += (norm - self.mean) / self.tokens
        self.loudest = max(self.loudest, ratio)
        action = "continue" if ratio < self.factor else "flag"
        return ProbeSignal(action, token_pos=record.token_pos, layer=record.layer, score=ratio)

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Say how loud it became."""
        verdict = "loud" if self.loudest >= self.factor else "quiet"
        facts = {"score": self.loudest, "tokens": self.tokens}
        return ProbeResult(self.request_id, self.extraction_point_name, verdict, metadata=facts)
'''

_HOST = """\
# A probe host. As many may run as the activations topics have partitions.
#   undercurrent probes run --config host.yaml
@PIPELINE@probes: probes.yaml
service:
  name: probes                          # first part of the consumer groups' names
metrics:
  port: 8081
"""

_MODEL_FOLDER = """\
    environment:
      UNDERCURRENT_BOOTSTRAP_SERVERS: kafka:9092
      UNDERCURRENT_ENGINE__MODEL: /model
    volumes:
      - {type: bind, source: ".", target: /etc/undercurrent, read_only: true}
      - {type: bind, source: @MODEL@, target: /model, read_only: true}"""

_MODEL_NAME = """\
    environment:
      UNDERCURRENT_BOOTSTRAP_SERVERS: kafka:9092
      HF_HOME: /models
    volumes:
      - {type: bind, source: ".", target: /etc/undercurrent, read_only: true}
      # What is downloaded stays here. Make the folder first, or Docker makes it for root alone: mkdir models
      - {type: bind, source: ./models, target: /models}"""

_COMPOSE = """\
# The ring of this folder on one machine: docker compose up
#   one prompt: docker compose run --rm producer send "Hello" --follow
# The images are built from Undercurrent's repository:
#   docker build --target probes -t undercurrent:probes . && docker build --target engine -t undercurrent:engine .
x-undercurrent: &undercurrent
  image: undercurrent:probes
  environment:
    UNDERCURRENT_BOOTSTRAP_SERVERS: kafka:9092
  volumes:
    - {type: bind, source: ".", target: /etc/undercurrent, read_only: true}
  restart: on-failure

services:
  kafka:
    image: apache/kafka:4.3.1
    environment:
      KAFKA_NODE_ID: "1"
      KAFKA_PROCESS_ROLES: broker,controller
      KAFKA_CONTROLLER_QUORUM_VOTERS: 1@kafka:9093
      KAFKA_LISTENERS: PLAINTEXT://:9092,HOST://:19092,CONTROLLER://:9093
      KAFKA_ADVERTISED_LISTENERS: PLAINTEXT://kafka:9092,HOST://localhost:19092
      KAFKA_LISTENER_SECURITY_PROTOCOL_MAP: PLAINTEXT:PLAINTEXT,HOST:PLAINTEXT,CONTROLLER:PLAINTEXT
      KAFKA_CONTROLLER_LISTENER_NAMES: CONTROLLER
      KAFKA_INTER_BROKER_LISTENER_NAME: PLAINTEXT
      KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR: "1"
      KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR: "1"
      KAFKA_TRANSACTION_STATE_LOG_MIN_ISR: "1"
      # A dead probe host's open transaction would otherwise hold its partitions up for ten seconds more.
      KAFKA_TRANSACTION_ABORT_TIMED_OUT_TRANSACTION_CLEANUP_INTERVAL_MS: "1000"
      KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS: "0"
      KAFKA_AUTO_CREATE_TOPICS_ENABLE: "false"
      KAFKA_LOG_DIRS: /var/lib/kafka/data
    ports:
      - "127.0.0.1:19092:19092"
    volumes:
      - {type: volume, source: kafka-data, target: /var/lib/kafka/data}
    healthcheck:
      test: ["CMD", "/opt/kafka/bin/kafka-broker-api-versions.sh", "--bootstrap-server", "localhost:9092"]
      interval: 5s
      timeout: 10s
      retries: 20
      start_period: 10s
    restart: unless-stopped

  topics:
    <<: *undercurrent
    command: ["topics", "apply", "--config", "/etc/undercurrent/engine.yaml"]
    depends_on:
      kafka: {condition: service_healthy}

  engine:
    <<: *undercurrent
    image: undercurrent:engine
@ENGINE@
    command: ["engine", "run", "--config", "/etc/undercurrent/engine.yaml"]
    shm_size: 1gb
    # An abort, a flush and a commit happen between SIGTERM and the end.
    stop_grace_period: 60s
    depends_on:
      topics: {condition: service_completed_successfully}
    healthcheck:
      test: ["CMD", "python", "-c", "import urllib.request as u; u.urlopen('http://localhost:8080/readyz', timeout=3)"]
      interval: 5s
      timeout: 5s
      retries: 3
      # Loading a model takes a minute or several.
      start_period: 600s

  probes:
    <<: *undercurrent
    command: ["probes", "run", "--config", "/etc/undercurrent/host.yaml"]
    stop_grace_period: 30s
    depends_on:
      topics: {condition: service_completed_successfully}
    healthcheck:
      test: ["CMD", "python", "-c", "import urllib.request as u; u.urlopen('http://localhost:8081/readyz', timeout=3)"]
      interval: 5s
      timeout: 5s
      retries: 3
      start_period: 60s

  producer:
    <<: *undercurrent
    profiles: ["once"]
    entrypoint: ["undercurrent", "prompts"]
    command: ["send", "Hello", "--follow"]
    restart: "no"
    depends_on:
      engine: {condition: service_healthy}
      probes: {condition: service_healthy}

volumes:
  kafka-data:
"""

_README = """\
# A pipeline of Undercurrent

Model: `@MODEL@`

| file | what it says |
|---|---|
| `engine.yaml` | the engine worker, the topics |
| `points.yaml` | what is captured of each request |
| `probes.yaml` | which probe reads which point, and what it may do; everything starts in shadow mode |
| `loud_tokens.py` | a first probe, to be replaced |
| `host.yaml` | the probe host |
| `docker-compose.yml` | all of it on one machine |

    undercurrent config check .                           # every setting, its value, where that comes from
    undercurrent validate points.yaml --probes probes.yaml
    undercurrent broker up                                # a broker for development; prints its address
    export UNDERCURRENT_BOOTSTRAP_SERVERS=...
    undercurrent topics apply --config engine.yaml
    undercurrent engine run --config engine.yaml          # a terminal of its own
    undercurrent probes run --config host.yaml            # and another
    undercurrent prompts send "Hello" --follow --config engine.yaml
    undercurrent tail undercurrent.verdicts               # what the probe said

A probe in shadow mode changes nothing. When its verdicts are right, set `mode: flag` or `mode: abort` in `probes.yaml`
and name the binding under `guards` in `engine.yaml`.
"""
