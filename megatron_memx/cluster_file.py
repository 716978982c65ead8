"""Reading cluster.yaml: checked against the shipped schema, errors with file, line and remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from megatron_memx.cluster import ASSUMED_LATENCY_S, Cluster, DeviceKind, Link, Node
from megatron_memx.errors import BadInputError
from megatron_memx.units import parse_bytes

FLAG = "--memx-cluster"
MAX_FILE_BYTES = 4 * 1024**2
# Outside these a link was most likely written in other units (Gbit, or MB).
_PLAUSIBLE_BYTES_PER_S = (1e6, 4e12)


@cache
def catalogue() -> dict[str, DeviceKind]:
    """Return the device kinds that MemX knows by name."""
    return {name: kind for name, (kind, _) in _catalogue().items()}


@cache
def _catalogue() -> dict[str, tuple[DeviceKind, dict[str, float]]]:
    text = resources.files("megatron_memx").joinpath("devices.yaml").read_text(encoding="utf-8")
    found = {}
    for name, row in yaml.load(text, Loader=_loader())["devices"].items():
        kind = DeviceKind(
            name=name,
            vendor=row["vendor"],
            platform=row["platform"],
            memory_bytes=row["memory_bytes"],
            peak_flops=row["peak_flops"],
            memory_bandwidth_bytes_per_s=row["memory_bandwidth_bytes_per_s"],
            matmul_efficiency=row.get("matmul_efficiency"),
            source=f"catalogue ({row['confidence']}): {'; '.join(row['sources'])}",
        )
        links = {
            where: row[f"{where}_node_bandwidth_bytes_per_s"]
            for where in ("intra", "inter")
            if f"{where}_node_bandwidth_bytes_per_s" in row
        }
        found[name] = (kind, links)
    return found


def catalogue_link(kind: str, *, between_nodes: bool = False) -> Link | None:
    """Return the catalogue's link inside a node of ``kind``, or None if it knows none.

    Args:
        between_nodes: Ask for the link between two nodes of the vendor's reference system.
    """
    where = "inter" if between_nodes else "intra"
    known = _catalogue().get(kind)
    if known is None or where not in known[1]:
        return None
    return Link(
        bandwidth_bytes_per_s=known[1][where],
        latency_s=ASSUMED_LATENCY_S[where],
        source="catalogue",
    )


def load_cluster(path: str) -> Cluster:
    """Read, check and return a cluster file.

    Raises:
        BadInputError: Unreadable, not YAML, against the schema, an unknown device kind.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise BadInputError(f"{path}: larger than {MAX_FILE_BYTES} bytes", flag=FLAG)
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInputError(
            f"{path}: cannot be read: {error.strerror}",
            fix="the path of a cluster file, or auto",
            flag=FLAG,
        ) from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: is not UTF-8 text", flag=FLAG) from error
    return parse_cluster(text, source=str(path))


def parse_cluster(text: str, *, source: str) -> Cluster:
    """Return the cluster that a file's text describes; ``source`` names it in errors."""
    try:
        document = yaml.compose(text, Loader=_loader())
        data = yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or "not YAML"
        raise BadInputError(f"{place}: not YAML: {problem}", flag=FLAG) from error
    where = _Lines(source, document)
    _check_schema(data, where)
    return _build(data, where)


class _Lines:
    """Finds the line of a path of keys in a composed document."""

    def __init__(self, source: str, document: Any) -> None:
        self.source = source
        self._document = document

    def at(self, path: Sequence[str | int]) -> str:
        """Return ``file:line`` of the deepest part of ``path`` that exists."""
        node, line = self._document, 1
        for step in path:
            found = None
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == str(step):
                        found, line = value, key.start_mark.line + 1
            elif (
                isinstance(node, yaml.SequenceNode)
                and isinstance(step, int)
                and step < len(node.value)
            ):
                found = node.value[step]
                line = found.start_mark.line + 1
            if found is None:
                break
            node = found
        return f"{self.source}:{line}"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of cluster files."""
    text = resources.files("megatron_memx").joinpath("cluster.schema.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _check_schema(data: Any, where: _Lines) -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())
    errors = sorted(validator.iter_errors(data), key=lambda error: list(map(str, error.path)))
    if not errors:
        return
    misspelt = [error for error in errors if error.validator == "additionalProperties"]
    first = misspelt[0] if misspelt else jsonschema.exceptions.best_match(errors) or errors[0]
    path = list(first.absolute_path)
    name = ".".join(map(str, path)) or "the file"
    fix = None
    if first.validator == "additionalProperties":
        allowed = list(first.schema.get("properties", ()))
        unknown = [key for key in first.instance if key not in allowed]
        path.append(unknown[0])
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        fix = near[0] if near else ", ".join(allowed)
    raise BadInputError(f"{where.at(path)}: {name}: {first.message}", fix=fix, flag=FLAG)


def _build(data: Mapping[str, Any], where: _Lines) -> Cluster:
    kinds: dict[str, DeviceKind] = {}
    nodes: list[Node] = []
    own = data.get("devices", {})
    for name, row in own.items():
        kinds[name] = _kind(name, row, where.at(["devices", name]))
    for index, row in enumerate(data["nodes"]):
        kind = row["device"]
        place = where.at(["nodes", index, "device"])
        if kind not in kinds:
            known = catalogue()
            if kind not in known:
                names = [*own, *known]
                near = difflib.get_close_matches(kind, names, n=3)
                raise BadInputError(
                    f"{place}: device kind {kind!r} is neither in the catalogue nor under devices",
                    fix=" or ".join(near) if near else ", ".join(names),
                    flag=FLAG,
                )
            kinds[kind] = known[kind]
        first = len(nodes)
        for copy in range(row.get("count", 1)):
            base = row.get("name", f"node{first}")
            numbered = row.get("count", 1) > 1
            nodes.append(
                Node(
                    name=f"{base}-{copy}" if numbered else base,
                    device_kind=kind,
                    num_devices=row["num_devices"],
                    address=row.get("address"),
                )
            )
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise BadInputError(f"{where.source}: two nodes are called {double!r}", flag=FLAG)
    intra, inter = _links(data, kinds, where)
    for kind in kinds:
        known_link = catalogue_link(kind)
        if kind not in intra and known_link is not None:
            intra[kind] = known_link
    return Cluster(
        name=str(data.get("name", Path(where.source).stem)),
        nodes=tuple(nodes),
        kinds=kinds,
        intra_node=intra,
        inter_node=inter,
    )


def _kind(name: str, row: Mapping[str, Any], place: str) -> DeviceKind:
    base = catalogue().get(row["like"]) if "like" in row else None
    if "like" in row and base is None:
        raise BadInputError(
            f"{place}: like: {row['like']!r} is not in the catalogue",
            fix=", ".join(catalogue()),
            flag=FLAG,
        )
    missing = [
        key
        for key in ("platform", "memory_bytes", "peak_flops", "memory_bandwidth_bytes_per_s")
        if key not in row and base is None
    ]
    if missing:
        raise BadInputError(
            f"{place}: device {name} lacks {', '.join(missing)}",
            fix="give them, or name a catalogue device under like",
            flag=FLAG,
        )
    try:
        return DeviceKind(
            name=name,
            vendor=row.get("vendor", base.vendor if base else "unknown"),
            platform=row.get("platform", base.platform if base else ""),
            memory_bytes=parse_bytes(
                row.get("memory_bytes", base.memory_bytes if base else 0), what="memory_bytes"
            ),
            peak_flops=row.get("peak_flops", base.peak_flops if base else {}),
            memory_bandwidth_bytes_per_s=row.get(
                "memory_bandwidth_bytes_per_s", base.memory_bandwidth_bytes_per_s if base else 0.0
            ),
            reserved_bytes=parse_bytes(row.get("reserved_bytes", 0), what="reserved_bytes"),
            matmul_efficiency=base.matmul_efficiency if base else None,
            source="cluster file",
        )
    except BadInputError as error:
        raise BadInputError(f"{place}: {error.message}", fix=error.fix, flag=FLAG) from error


def _links(
    data: Mapping[str, Any], kinds: Mapping[str, DeviceKind], where: _Lines
) -> tuple[dict[str, Link], dict[str, Link]]:
    intra: dict[str, Link] = {}
    inter: dict[str, Link] = {}
    for index, row in enumerate(data.get("links", ())):
        place = where.at(["links", index])
        between = row["between"]
        for name in between:
            if name not in kinds:
                raise BadInputError(
                    f"{place}: no node has device kind {name!r}", fix=", ".join(kinds), flag=FLAG
                )
        speed = float(row["bandwidth_bytes_per_s"])
        low, high = _PLAUSIBLE_BYTES_PER_S
        if not low <= speed <= high:
            raise BadInputError(
                f"{place}: {speed:g} bytes a second is outside {low:g} to {high:g} for one device; "
                "was it written in Gbit or GB?",
                fix="bytes a second, e.g. 25e9 for 200 Gbit/s",
                flag=FLAG,
            )
        inside = row["where"] == "intra-node"
        link = Link(
            bandwidth_bytes_per_s=speed,
            latency_s=float(
                row.get("latency_s", ASSUMED_LATENCY_S["intra" if inside else "inter"])
            ),
            kind=row.get("kind", "direct"),
        )
        if inside:
            intra[between[0]] = link
        else:
            inter["|".join(sorted((between[0], between[-1])))] = link
    return intra, inter


@cache
def _loader() -> Any:
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Safe YAML in which ``25e9`` is a number, as in YAML 1.2."""

    import re

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)$"),
        list("-+0123456789"),
    )
    return Loader
