"""The JSON Schema of a spec file: for editors, and for checks where there is no Python.

It accepts whatever the parser accepts, old spellings included. It refuses most of what the parser refuses: what a
schema cannot say is that names are unique and that a slice is not empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercurrent.spec.enums import ExecutionMode, InterventionMode, ProbeKind, TimeoutAction, UntilKind
from undercurrent.spec.model import SpecModel
from undercurrent.spec.position import SINGLE_PATTERN

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_DESCRIPTIONS: Mapping[str, str] = {
    "name": "How prompts, probes and topics call the point; unique in the file.",
    "layers": "One layer or several, 0-based: a layer means that decoder block's output.",
    "tensor_type": "Which tensor of the layer. final_norm has one layer, whose number is that of the decoder layers. "
    "kv is [2, kv_heads, head_dim], keys before values; router_topk is [2, k], expert ids before weights; layer_input "
    "is the residual stream before the layer.",
    "position": "Which tokens: a whole number, prompt[i], generated[i] (each with +k or -k behind it), prompt[*], "
    "generated[*], a slice [a:] or [a:b] of either, or * for every token. 0-based.",
    "stride": "Of many tokens: every n-th, counted from the start of the slice.",
    "until": "Of many tokens: what ends the capture. generation_end, {fixed_count: N} or {stop_token: ID or TEXT}.",
    "probe_type": "Registered name of the probe that an in-process router runs; pipelines bind probes elsewhere.",
    "probe_kind": "By default single_shot for one token judged inline, else trajectory.",
    "probe_args": "Settings for the probe.",
    "execution_mode": "Whether generation waits for the probe (inline) or goes on (async). Pipelines take async only.",
    "queue_depth": "Of an async point: records of one request that may wait.",
    "intervention": "Of an inline point: what its probe may hold up.",
    "dtype": "Element type of published values; model is what the model computed, bit for bit. int8 has a float32 "
    "scale for each token and layer.",
    "overflow": "What happens to records when a buffer is full.",
    "token_ids": "Whether records carry the input token ids.",
    "reduce": "{project: FILE}: the engine multiplies each row with a float matrix [width, k] of a .safetensors or "
    ".npy file; a path starts from this file's folder.",
    "on_unavailable": "What an engine does while no probe guards the point.",
}
_OLD_SPELLINGS: Mapping[str, str] = {"layer": "layers", "tensor": "tensor_type"}


def json_schema() -> Schema:
    """Return the JSON Schema of a spec file, draft 2020-12."""
    schema = SpecModel.model_json_schema(mode="validation")
    schema["properties"]["version"] = {"enum": [1, "1", "1.0"], "default": 1, "description": "Format of the file."}
    parts = schema["$defs"]
    _complete_point(parts["PointModel"])
    parts["UntilModel"]["allOf"] = [
        _needs(UntilKind.FIXED_COUNT, "count"),
        _needs(UntilKind.STOP_TOKEN, "stop_token"),
    ]
    parts["InterventionModel"]["allOf"] = [
        _when(
            _has("mode", InterventionMode.BLOCK_UNTIL_SIGNAL),
            _given("timeout_ms"),
            {"properties": {"timeout_ms": {"type": "null"}, "on_timeout": {"const": TimeoutAction.CONTINUE.value}}},
        )
    ]
    return {"$schema": DIALECT, **schema, "title": "Undercurrent spec"}


def _complete_point(point: Schema) -> None:
    fields: dict[str, Schema] = point["properties"]
    for name, text in _DESCRIPTIONS.items():
        fields[name]["description"] = text
    for old, new in _OLD_SPELLINGS.items():
        fields[old] = {**fields[new], "description": f"Old spelling of {new}.", "deprecated": True}
    fields["every_n"] = {**fields["stride"], "description": "The same as stride."}
    point["required"] = [name for name in point["required"] if name not in _OLD_SPELLINGS.values()]
    is_async = _has("execution_mode", ExecutionMode.ASYNC)
    may_not_hold = {"anyOf": [{"type": "null"}, {"properties": {"mode": {"const": InterventionMode.REJECT.value}}}]}
    point["allOf"] = [
        *({"oneOf": [{"required": [new]}, {"required": [old]}]} for old, new in _OLD_SPELLINGS.items()),
        {"not": {"required": ["stride", "every_n"]}},
        _when(_given("queue_depth"), is_async),
        _when(
            is_async,
            {
                "properties": {
                    "probe_kind": {"not": {"const": ProbeKind.SINGLE_SHOT.value}},
                    "intervention": may_not_hold,
                }
            },
        ),
        _when({"properties": {"position": _single_position()}, "required": ["position"]}, _only_one_token()),
    ]


def _single_position() -> Schema:
    return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": rf"^\s*{SINGLE_PATTERN}\s*$"}]}


def _only_one_token() -> Schema:
    end = UntilKind.GENERATION_END.value
    return {
        "properties": {
            "stride": {"const": 1},
            "every_n": {"const": 1},
            "until": {"anyOf": [{"const": end}, {"properties": {"kind": {"const": end}}, "required": ["kind"]}]},
        }
    }


def _has(field: str, value: str) -> Schema:
    return {"properties": {field: {"const": str(value)}}, "required": [field]}


def _given(field: str) -> Schema:
    return {"properties": {field: {"not": {"type": "null"}}}, "required": [field]}


def _needs(kind: UntilKind, field: str) -> Schema:
    """Return: this rule has its value, no other rule has it."""
    return _when(_has("kind", kind), _given(field), {"not": _given(field)})


def _when(condition: Schema, then: Schema, otherwise: Schema | None = None) -> Schema:
    return {"if": condition, "then": then} | ({} if otherwise is None else {"else": otherwise})
