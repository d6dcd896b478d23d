"""YAML text to plain data, safely: no tags, no bombs, no doubled keys, and one kind of error.

YAML can name Python objects, expand a few lines into gigabytes through aliases, and nest deep enough to exhaust the
stack. So the text is first read as events, which takes no recursion, then as nodes, which are counted as if every alias
were written out; only then are values built, of the types that JSON has.
"""

from __future__ import annotations

from typing import Any

import yaml

from undercurrent.errors import SpecValidationError
from undercurrent.spec.values import MAX_DEPTH

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_NODES = 100_000
"""Most values of one document, aliases written out."""

# The C scanner is some twenty times faster; PyYAML has it wherever wheels are used.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


def parse_plain_yaml(text: str) -> object:
    """Return the one document of a YAML text as mappings, lists, text, numbers, booleans and None.

    Raises:
        SpecValidationError: it is no YAML, or more than plain data.
    """
    if not isinstance(text, str):
        raise SpecValidationError(f"{type(text).__name__}; accepted: YAML text")
    if len(text) > MAX_TEXT_BYTES:
        raise SpecValidationError(f"the YAML text has {len(text)} characters; accepted: up to {MAX_TEXT_BYTES}")
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Counter().check(node)
            document: object = loader.construct_document(node)
            return document
        finally:
            loader.dispose()
    except yaml.YAMLError as exc:
        raise SpecValidationError(f"this is not YAML: {_one_line(exc)}") from exc
    except (ValueError, OverflowError) as exc:  # an int of 5,000 digits, a lone surrogate
        raise SpecValidationError(f"a YAML value cannot be read: {_one_line(exc)}") from exc


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300]


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SpecValidationError(f"YAML nested deeper than {MAX_DEPTH} levels{_where(event)}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _where(marked: yaml.Node | yaml.Event) -> str:
    mark = marked.start_mark
    return "" if mark is None else f" at line {mark.line + 1}"


class _Counter:
    """Checks a node graph once, and counts it as if every alias were written out."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def check(self, node: yaml.Node) -> int:
        """Return the size of a node with all below it.

        Raises:
            SpecValidationError: too large, recursive, a tag beyond plain data, or a doubled key.
        """
        key = id(node)
        if key in self._open:
            raise SpecValidationError(f"a YAML alias contains itself{_where(node)}")
        if key in self._sizes:
            return self._sizes[key]
        if node.tag not in _PLAIN_TAGS:
            hint = "; put it in quotes" if node.tag.endswith((":timestamp", ":value")) else ""
            raise SpecValidationError(f"YAML tag {node.tag!r:.80} is not plain data{hint}{_where(node)}")
        self._open.add(key)
        size = 1
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            size += sum(self.check(child) for pair in node.value for child in pair)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(self.check(child) for child in node.value)
        if size > MAX_NODES:
            raise SpecValidationError(f"the YAML holds more than {MAX_NODES} values, aliases written out")
        self._open.discard(key)
        self._sizes[key] = size
        return size

    @staticmethod
    def _check_keys(node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _value in node.value:
            if key.tag.endswith(":merge"):
                continue
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                raise SpecValidationError(f"YAML key {shown!r:.60} is not text; put it in quotes{_where(key)}")
            if key.value in seen:
                raise SpecValidationError(f"YAML key {key.value!r:.60} stands twice{_where(key)}")
            seen.add(key.value)
