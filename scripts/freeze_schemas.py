"""Keep bytes of every version of every schema for ever: `python scripts/freeze_schemas.py`, after a schema was changed.

What is there already is never written again: these are the bytes that a topic may still hold. A test has every version
read every other's. The script refuses where the schema of kept bytes is gone: then the released schema was changed in
its place, and has to be moved to `schemas/earlier/` instead.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import sys
from pathlib import Path

import fastavro
from fastavro.utils import generate_one

from undercurrent.codec.avro import EARLIER, SCHEMA_NAMES, load_fingerprint, load_schema

FROZEN = Path(__file__).resolve().parent.parent / "tests" / "unit" / "undercurrent" / "codec" / "frozen.json"
_EXAMPLES = 3


def example(key: str, number: int) -> str:
    """Return the bytes of a made-up record, hex, framed by single-object encoding."""
    # The library that makes them up draws from this generator alone.
    random.seed(int.from_bytes(hashlib.sha256(f"{key} {number}".encode()).digest()[:8], "big"))
    out = io.BytesIO()
    schema = load_schema(key)
    fastavro.schemaless_writer(out, schema, generate_one(schema))
    return (b"\xc3\x01" + load_fingerprint(key) + out.getvalue()).hex()


def main() -> int:
    """Add what is missing; return the exit status."""
    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    keys = (*EARLIER, *SCHEMA_NAMES)
    known = {load_fingerprint(key).hex() for key in keys}
    lost = [name for name, examples in frozen.items() if examples[0][4:20] not in known]
    if lost:
        sys.stderr.write(f"the released schema of {', '.join(lost)} is gone: move it to schemas/earlier/ first\n")
        return 1
    there = {examples[0][4:20] for examples in frozen.values()}
    for key in keys:
        mark = load_fingerprint(key).hex()
        if mark not in there:
            frozen[f"{key.partition('.')[0]} {mark}"] = [example(key, number) for number in range(_EXAMPLES)]
    FROZEN.write_text(json.dumps(frozen, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
