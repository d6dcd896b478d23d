"""YAML text to plain data, safely: no tags, no bombs, no doubled keys, and one kind of error.

YAML can name Python objects, expand a few lines into gigabytes through aliases, and nest deep enough to exhaust the
stack. So the text is first read as events, which takes no recursion and ends at the first sign of too much, then as
nodes, which are counted as if every alias were written out; only then are values built, of the types that JSON has.
"""

from __future__ import annotations

from typing import Any

import yaml

from undercurrent.errors import SpecValidationError
from undercurrent.spec.values import MAX_DEPTH, MAX_NODES, shown

MAX_TEXT_CHARS = 4 * 1024 * 1024
# YAML 1.1 reads 1:59:59 as base 60, and PyYAML takes quadratic time for it.
_MAX_NUMBER_CHARS = 500

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
    if len(text) > MAX_TEXT_CHARS:
        raise SpecValidationError(f"the YAML text is too long; accepted: up to {MAX_TEXT_CHARS} characters")
    try:
        _check_events(text)
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
    # An int of 5,000 digits, a lone surrogate, `!!int ""`, `!!bool maybe`: PyYAML does not wrap what these lead to.
    except (ValueError, OverflowError, LookupError, TypeError) as exc:
        raise SpecValidationError(f"a YAML value cannot be read: {_one_line(exc)}") from exc


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300]


def _check_events(text: str) -> None:
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if count > 2 * MAX_NODES + 8:  # two events a collection, and the document's own
            raise _too_large()
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _too_large() -> SpecValidationError:
    return SpecValidationError(f"the YAML holds more than {MAX_NODES} values, aliases written out")


def _too_deep(marked: yaml.Node | yaml.Event) -> SpecValidationError:
    return SpecValidationError(f"YAML nested deeper than {MAX_DEPTH} levels{_where(marked)}")


def _where(marked: yaml.Node | yaml.Event) -> str:
    mark = marked.start_mark
    return "" if mark is None else f" at line {mark.line + 1}"


class _Counter:
    """Checks a node graph once, and counts it as if every alias were written out."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def check(self, node: yaml.Node) -> tuple[int, int]:
        """Return the size of a node with all below it, and how many levels it has.

        Raises:
            SpecValidationError: too large or deep, recursive, a tag beyond plain data, or a doubled key.
        """
        key = id(node)
        if key in self._open:
            raise SpecValidationError(f"a YAML alias contains itself{_where(node)}")
        if key in self._measured:
            return self._measured[key]
        if node.tag not in _PLAIN_TAGS:
            hint = "; put it in quotes" if node.tag.endswith((":timestamp", ":value")) else ""
            raise SpecValidationError(f"YAML tag {shown(node.tag)} is not plain data{hint}{_where(node)}")
        self._open.add(key)
        size, levels = 1, 0
        for child in self._children(node):
            below, deep = self.check(child)
            size, levels = size + below, max(levels, deep)
        if size > MAX_NODES:
            raise _too_large()
        if isinstance(node, yaml.CollectionNode):
            levels += 1
        if levels > MAX_DEPTH:  # each level an alias of the one before
            raise _too_deep(node)
        self._open.discard(key)
        self._measured[key] = size, levels
        return size, levels

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            return [child for pair in node.value for child in pair]
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        if len(node.value) > _MAX_NUMBER_CHARS and node.tag.endswith((":int", ":float")):
            raise SpecValidationError(f"a YAML number of {len(node.value)} characters cannot be read{_where(node)}")
        return []

    @staticmethod
    def _check_keys(node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _value in node.value:
            if key.tag.endswith(":merge"):
                continue
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                found = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                raise SpecValidationError(f"YAML key {shown(found)} is not text; put it in quotes{_where(key)}")
            if key.value in seen:
                raise SpecValidationError(f"YAML key {shown(key.value)} stands twice{_where(key)}")
            seen.add(key.value)
