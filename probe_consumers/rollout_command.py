"""What `undercurrent probe deploy` and its like do: check, append one entry, and read back whether it counts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from probe_consumers.bound import Bound
from probe_consumers.config import HostConfig
from probe_consumers.rollout_log import read_rollouts
from probe_consumers.versions import load_version
from undercurrent.cli.tables import moment
from undercurrent.core import Probe
from undercurrent.errors import ConfigError, UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.pipeline import interactive
from undercurrent.probes import Binding, load_probe
from undercurrent.probes.trajectory import TrajectoryProbe
from undercurrent.protocol.messages import BindingMode, Rollout, RolloutVersion
from undercurrent.protocol.rollout_changes import Asked
from undercurrent.protocol.rollouts import Placed, Rollouts, key_of
from undercurrent.spec import ProbeSpec
from undercurrent.subjects import codec_of
from undercurrent.topics import TopicPlan

_FLUSH_S = 30.0

Change = Callable[[Asked, Sequence[Placed]], Rollout]
"""Makes the new entry; see `undercurrent.protocol.rollout_changes`."""


def bound_of(config: HostConfig, name: str) -> Bound:
    """Return the binding of a probe.

    Raises:
        ConfigError: no binding has the name.
    """
    found = next((bound for bound in config.bounds if bound.binding.name == name), None)
    if found is None:
        known = ", ".join(bound.binding.name for bound in config.bounds)
        raise ConfigError(f"probe {name!r}: no binding of this host is called so; there are {known}")
    return found


def version_of(config: HostConfig, bound: Bound, folder: Path, mode: BindingMode, share: float) -> RolloutVersion:
    """Return a folder as a version that can be rolled out.

    Args:
        config: of the probe hosts.
        bound: the binding whose version it will be.
        folder: below the hosts' folder of artefacts.
        mode: the most that it may do.
        share: of the requests.

    Raises:
        ConfigError: the folder lies elsewhere, or its probe does not fit the binding's point.
        ProbeError: it is no probe.
    """
    root = config.artefacts.resolve()
    if not folder.resolve().is_relative_to(root) or folder.resolve() == root:
        raise ConfigError(
            f"{folder}: accepted: a folder below {config.artefacts} (key 'artefacts'), where each host looks for it "
            "under the same name: copy it there, on every host"
        )
    name = folder.resolve().relative_to(root).as_posix()
    loaded = load_probe(f"./{name}", base=config.artefacts)
    version = RolloutVersion(
        artefact=name, version=loaded.version, fingerprint=loaded.fingerprint, mode=mode, share=share
    )
    _check_fit(config.spec, bound.binding, loaded.sample, folder)
    return version


def check_model(config: HostConfig, bound: Bound, version: RolloutVersion, history: Sequence[Placed]) -> None:
    """Refuse a version that was fitted on another model than the deployed one: a stream fits at most one of the two.

    Raises:
        ConfigError: it was.
        ProbeError: the deployed version is not to be found.
    """
    deployed = history[-1].entry.deployed if history else None
    own = deployed is None or not deployed.artefact
    now = bound.loaded if deployed is None or own else load_version(config.artefacts, bound.binding.point, deployed)
    new = load_version(config.artefacts, bound.binding.point, version)
    if not isinstance(now.sample, TrajectoryProbe) or not isinstance(new.sample, TrajectoryProbe):
        return
    before, after = now.sample.artefact, new.sample.artefact
    for what, old, fresh in (
        ("the model", before.config.fingerprints.model, after.config.fingerprints.model),
        ("the LoRA adapter", before.config.fingerprints.lora, after.config.fingerprints.lora),
        ("a width of", before.width, after.width),
    ):
        if old is not None and fresh is not None and old != fresh:
            raise ConfigError(
                f"{version.artefact}: was fitted on {what} {fresh!s:.16}, the deployed version on {old!s:.16}: no "
                "stream fits both; --force where the engines change too"
            )


def _check_fit(spec: ProbeSpec, binding: Binding, sample: Probe, folder: Path) -> None:
    if not isinstance(sample, TrajectoryProbe):
        return
    config, name = sample.artefact.config, binding.point
    if config.point not in (None, name):
        raise ConfigError(f"{folder}: was made for point {config.point!r}; {binding.name} reads {name!r}")
    # Rows of several points are shown as those of the first layer of the first.
    point = next(point for point in spec if point.name == binding.sources[0])
    layers = point.layers[:1] if binding.points else point.layers
    missing = sorted(set(config.all_layers) - set(layers))
    if missing:
        raise ConfigError(f"{folder}: reads layer {missing[0]}; point {name!r} has {list(layers)}")
    if config.tensor_type is not point.tensor_type:
        raise ConfigError(f"{folder}: reads {config.tensor_type.value}; point {name!r} has {point.tensor_type.value}")


def roll_out(config: HostConfig, name: str, change: Change, *, author: str, reason: str) -> Rollouts:
    """Append the entry that a change makes, and return what is in force then.

    Raises:
        ConfigError: the change makes no sense now, or somebody else was faster.
        TopicError: there is no topic of rollouts.
        UnreachableError: the broker did not take it.
    """
    bound_of(config, name)
    settings, topic = interactive(config.kafka), config.plan.rollouts
    TopicAdmin(settings).check_partitions([item for item in config.plan.topics() if item.name == topic])
    asked = Asked(
        probe=name,
        entry_id=uuid.uuid4().hex,
        author=author,
        reason=reason,
        created_at_us=time.time_ns() // 1000,
    )
    entry = change(asked, read_rollouts(settings, topic).history(name))
    _append(settings, config.plan, entry)
    known = read_rollouts(settings, topic)
    if all(placed.entry.entry_id != entry.entry_id for placed in known.history(name)):
        raise ConfigError(
            f"probe {name}: somebody else changed it at the same time, so that nothing came of this: look at "
            f"`undercurrent probe rollouts {name}` and ask again"
        )
    return known


def _append(settings: KafkaSettings, plan: TopicPlan, entry: Rollout) -> None:
    topic, value = plan.rollouts, codec_of(settings, plan).encode(entry)
    failed: list[str] = []

    def delivered(delivery: Delivery) -> None:
        if delivery.error is not None:
            failed.append(delivery.error.reason)

    publisher = Publisher(settings)
    try:
        refused = publisher.produce(topic, value, key=key_of(entry), partition=0, on_delivery=delivered)
        left = publisher.flush(_FLUSH_S)
    finally:
        publisher.close()
    if refused is not None or left or failed:
        reason = refused.reason if refused is not None else (failed or ["no answer"])[0]
        raise UnreachableError(f"{topic}: the entry was not acknowledged: {reason}")


def in_force(config: HostConfig, known: Rollouts, name: str) -> dict[str, Any]:
    """Return what new requests get of a probe, as plain data."""
    bound, entry = bound_of(config, name), known.in_force(name)
    own = {"version": bound.loaded.version, "fingerprint": bound.loaded.fingerprint, "artefact": bound.binding.probe}
    parts = [("deployed", None if entry is None else entry.deployed)]
    if entry is not None and entry.candidate is not None:
        parts.append(("candidate", entry.candidate))
    told: dict[str, Any] = {
        "probe": name,
        "sequence": 0 if entry is None else entry.sequence,
        "paused": entry is not None and entry.paused,
    }
    for role, version in parts:
        named = own if version is None or not version.artefact else _plain(version)
        mode = bound.binding.mode if version is None else version.mode.value
        told[role] = {**named, "mode": mode, "share": 1.0 if version is None else version.share}
    return told


def history_of(known: Rollouts, name: str) -> list[dict[str, Any]]:
    """Return every valid entry of a probe as plain data, oldest first."""
    return [
        {
            "sequence": placed.entry.sequence,
            "offset": placed.offset,
            "created_at": moment(placed.entry.created_at_us),
            "change": placed.entry.change.value,
            "paused": placed.entry.paused,
            "deployed": _described(placed.entry.deployed),
            "candidate": _described(placed.entry.candidate),
            "author": placed.entry.author,
            "reason": placed.entry.reason,
        }
        for placed in known.history(name)
    ]


def _plain(version: RolloutVersion) -> dict[str, Any]:
    return {"version": version.version, "fingerprint": version.fingerprint, "artefact": version.artefact}


def _described(version: RolloutVersion | None) -> dict[str, Any] | None:
    return None if version is None else {**_plain(version), "mode": version.mode.value, "share": version.share}
