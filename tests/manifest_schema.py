"""Checks a manifest against Kubernetes' custom resource definitions of the fields that ftrun uses.

`tests/unit/cli/manifest_fields.yaml` has names, types, limits and choices of these fields only, as
a JSON schema. An unknown field is an error, as in a cluster.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FIELDS = Path(__file__).parent / "unit" / "cli" / "manifest_fields.yaml"
QUANTITY = re.compile(r"(\d+(\.\d+)?)(m|[kMGTPE]|[KMGTPE]i)?")
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def problems(document: Mapping[str, Any]) -> list[str]:
    """All differences between a document and its schema; empty if there are none."""
    schemas = _schemas()
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    return list(_wrong(document, schemas[kind], kind)) if kind in schemas else [f"no {kind}"]


@cache
def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FIELDS.read_text())
    return found


def _wrong(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        is_quantity = isinstance(value, str) and QUANTITY.fullmatch(value) is not None
        if not is_quantity and (not isinstance(value, int) or isinstance(value, bool)):
            yield f"{at}: {value!r} is not a quantity"
        return
    wanted = schema.get("type", "object")
    if not isinstance(value, _TYPES[wanted]) or (wanted == "integer" and isinstance(value, bool)):
        yield f"{at}: {value!r} is no {wanted}"
        return
    yield from _beyond(value, schema, at)
    if isinstance(value, dict):
        yield from _wrong_object(value, schema, at)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _wrong(one, schema["items"], f"{at}[{place}]")


def _beyond(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is not one of {schema['enum']}"
    for limit in ("maxItems", "maxLength"):
        if limit in schema and len(value) > schema[limit]:
            yield f"{at}: {len(value)} long, and {schema[limit]} may be"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{at}: {value} is below {schema['minimum']}"


def _wrong_object(value: Mapping[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}: {name} is missing"
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, one in value.items():
        if name in known or isinstance(others, dict):
            yield from _wrong(one, known.get(name, others), f"{at}.{name}")
        else:
            yield f"{at}: there is no field {name}"
