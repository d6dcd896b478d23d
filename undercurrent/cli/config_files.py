"""Configuration files of a folder: which app each is for, its settings with their sources, what is wrong with it.

The apps are above this package, so that their models are named as text and imported when a file asks for them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from undercurrent.errors import ConfigError, ProbeError, ProbingError, SpecError
from undercurrent.pipeline import connection, topic_plan
from undercurrent.probes import load_binding, load_bindings
from undercurrent.secret_keys import MASK, is_secret
from undercurrent.service.config import shown, validated
from undercurrent.service.reading import Names, Source, Sourced, read_mapping, read_sourced
from undercurrent.spec import load_yaml_file
from undercurrent.topics import TopicPlan

SHARED = ("kafka", "topics", "points")
DEFAULT = Source("default")
_COMMON = {"metrics", "logging"}
_PATHS = ("points", "probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An app that has a configuration file.

    Args:
        name: for people.
        model: `module:Class` of its own sections.
        check: `module:function` (sections, folder) that the app itself calls.
        own: attribute of what that returns, which holds its own sections.
        also: keys beside its own sections and the shared ones.
    """

    name: str
    model: str
    check: str
    own: str
    also: tuple[str, ...] = ()

    def own_keys(self) -> set[str]:
        """Return the keys that are its own."""
        fields = load(self.model).model_fields
        return {field.alias or name for name, field in fields.items()} | set(self.also)


APPS = (
    App(
        name="engine worker",
        model="engine_worker.config:WorkerSections",
        check="engine_worker.config:worker_config",
        own="own",
    ),
    App(
        name="probe host",
        model="probe_consumers.config:HostSections",
        check="probe_consumers.config:host_config",
        own="host",
        also=("probes", "bindings"),
    ),
    App(
        name="bare vLLM server",
        model="undercurrent.adapters.vllm.server_settings:ServerSections",
        check="undercurrent.adapters.vllm.server_settings:config_in",
        own="own",
    ),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as it will be used.

    Args:
        key: its path, dotted.
        value: plain data, masked where it is a secret.
        source: where it came from.
    """

    key: str
    value: Any
    source: str

    def cells(self) -> dict[str, str]:
        """Return it as a row of a table."""
        text = self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)
        return {"key": self.key, "value": "-" if self.value is None else text or '""', "source": self.source}


@dataclass(slots=True)
class Checked:
    """What was found out about a file.

    Args:
        path: the file.
        kind: what it is.
        summary: in words, where nothing is wrong.
        settings: every setting.
        errors: what is wrong, each naming file and key.
        plan: the topics that it makes, where it makes some.
    """

    path: Path
    kind: str
    summary: str = "ok"
    settings: list[Setting] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    plan: TopicPlan | None = None

    def attempt(self, action: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the action returns, or None
        """Return what an action returns; None where it raises, and that is noted with the file's name."""
        try:
            return action()
        except ProbingError as exc:
            message = _with_key(exc)
            message = message if message.startswith(str(self.path)) else f"{self.path}: {message}"
            if message not in self.errors:
                self.errors.append(message)
            return None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        settings = [asdict(setting) for setting in self.settings]
        return {
            "file": str(self.path),
            "kind": self.kind,
            "ok": not self.errors,
            "settings": settings,
            "errors": self.errors,
        }


def check_folder(folder: Path, environment: Mapping[str, str]) -> list[Checked]:
    """Return what was found out about each configuration file of a folder.

    Args:
        folder: the folder, or one file.
        environment: the process's variables.

    Raises:
        ConfigError: there is no such folder, or no configuration in it.
    """
    try:
        paths = [folder] if folder.is_file() else sorted(filter(_is_candidate, folder.iterdir()))
    except OSError as exc:
        raise ConfigError(f"{folder}: cannot be read: {exc.strerror}") from exc
    results = [result for path in paths if (result := check_file(path, environment)) is not None]
    if not results:
        raise ConfigError(f"{folder}: holds no configuration (*.yaml)")
    _compare_topics(results)
    return results


def _is_candidate(path: Path) -> bool:
    # A folder of such a name is worth a complaint; a pipe would be waited for.
    return path.suffix in (".yaml", ".yml") and (path.is_file() or path.is_dir() or path.is_symlink())


def check_file(path: Path, environment: Mapping[str, str]) -> Checked | None:
    """Return what was found out about a file, None where it is somebody else's, such as a Compose file."""
    result = Checked(path, "configuration")
    data = result.attempt(lambda: read_mapping(path))
    if data is None:
        return result
    if "extraction_points" in data:
        return _check_points(path)
    if "services" in data:
        return None
    if "bindings" in data and set(data) <= {"version", "bindings"}:
        return _check_bindings(path)
    if not data:
        result.errors.append(f"{path}: is empty")
        return result
    app = _app_of(data)
    if app is None and not set(data) & {*SHARED, *_COMMON}:
        return Checked(path, "not a configuration of Undercurrent", "skipped")
    read: Sourced | None = result.attempt(lambda: read_sourced(path, environment, frozenset()))
    if read is not None:
        _check_sections(result, app, read)
    return result


def _with_key(error: ProbingError) -> str:
    """Return an error's text; one that names another file is led by the key that names that file."""
    text = str(error)
    key = "points" if isinstance(error, SpecError) else "probes" if isinstance(error, ProbeError) else ""
    return f"{key}: {text}" if key else text


def load(target: str) -> Any:  # noqa: ANN401 - a class or a function of an app
    """Return what `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_points(path: Path) -> Checked:
    result = Checked(path, "extraction points")
    try:
        result.summary = f"ok: {', '.join(load_yaml_file(path).names) or 'none'}"
    except SpecError as exc:
        result.errors.append(str(exc))
    return result


def _check_bindings(path: Path) -> Checked:
    result = Checked(path, "bindings")
    try:
        bindings = load_bindings(path)
    except ConfigError as exc:
        result.errors.append(str(exc))
        return result
    for binding in bindings:
        try:
            load_binding(binding, base=path.parent)
        except ProbingError as exc:
            result.errors.append(f"{path}: {exc}")
    result.summary = f"ok: {', '.join(f'{binding.name} ({binding.mode})' for binding in bindings)}"
    return result


def _app_of(data: Mapping[str, Any]) -> App | None:
    """Return the app whose own keys a file has most of; None where it has only what all of them share."""
    counts = [(len((app.own_keys() - _COMMON) & set(data)), app) for app in APPS]
    best, app = max(counts, key=lambda item: item[0])
    return app if best else None


def _check_sections(result: Checked, app: App | None, read: Sourced) -> None:
    sections, folder = read.sections, result.path.parent
    kafka = result.attempt(lambda: connection(sections, None))
    if kafka is not None:
        result.settings += [_setting(("kafka", key), value, read) for key, value in kafka.keys().items()]
    result.plan = result.attempt(lambda: topic_plan(sections, folder))
    if result.plan is not None:
        fields = asdict(result.plan)
        result.settings += [
            _setting(("topics", key), value, read) for key, value in fields.items() if key not in ("points", "extra")
        ]
    result.settings += [_setting((key,), sections[key], read) for key in _PATHS if isinstance(sections.get(key), str)]
    if app is None:
        result.kind = "sections that apps share"
        unknown = sorted(set(sections) - set(SHARED))
        if unknown:
            result.errors.append(f"{result.path}: {unknown[0]}: unknown key; accepted here: {_accepted()}")
        return
    result.kind = app.name
    own = result.attempt(lambda: validated(load(app.model), _own(app, sections), beside=(*SHARED, *app.also)))
    checked = result.attempt(lambda: load(app.check)(sections, folder))
    if checked is not None:
        own = getattr(checked, app.own)
    if own is not None:
        values = own.model_dump(by_alias=True)
        result.settings += [_setting(names, value, read) for names, value in _leaves(values, ())]


def _own(app: App, sections: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sections.items() if key not in (*SHARED, *app.also)}


def _accepted() -> str:
    return ", ".join([*SHARED, *sorted({key for app in APPS for key in app.own_keys()})])


def _leaves(values: Mapping[str, Any], names: Names) -> Iterator[tuple[Names, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*names, key))
        else:
            yield (*names, key), value


def _setting(names: Names, value: Any, read: Sourced) -> Setting:  # noqa: ANN401 - any value
    source = next((read.sources[known] for known in _spellings(names) if known in read.sources), DEFAULT)
    secret = any(known[: len(names)] == names and origin.secret for known, origin in read.sources.items())
    hidden = value is not None and (source.secret or secret or any(is_secret(name) for name in names))
    plain = MASK if hidden else shown(value)
    try:
        json.dumps(plain, allow_nan=False)
    except ValueError:  # an infinity among an engine's arguments
        plain = str(plain)
    return Setting(".".join(names), plain, source.text)


def _spellings(names: Names) -> Sequence[Names]:
    """Return the key paths that may have set a value."""
    if names[0] != "kafka":
        return [names]
    key = names[1]
    other = {"bootstrap_servers": "bootstrap.servers", "schema.registry.url": "schema_registry_url"}.get(key, key)
    return [("kafka", *path) for path in ((key,), (other,), ("options", key))]


def _compare_topics(results: Sequence[Checked]) -> None:
    """Note where files of one pipeline make other topics: each app would look for what the other did not create."""
    first: dict[str, Checked] = {}
    for result in results:
        if result.plan is None:
            continue
        other = first.setdefault(result.plan.prefix, result)
        mine, theirs = asdict(result.plan), asdict(other.plan or result.plan)
        for key in mine.keys() - {"points", "extra"}:
            if mine[key] != theirs[key]:
                result.errors.append(
                    f"{result.path}: topics.{key}: {mine[key]!r}, but {other.path.name} says {theirs[key]!r}"
                )
