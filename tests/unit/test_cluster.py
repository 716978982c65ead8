"""Clusters from YAML: what is understood, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from conftest import ROOT

from megatron_memx.cluster import Cluster
from megatron_memx.cluster_file import catalogue, load_cluster, parse_cluster, schema
from megatron_memx.errors import BadInputError

EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_round_trip(path: Path) -> None:
    cluster = load_cluster(str(path))
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again.to_dict() == cluster.to_dict()


def test_unequal_nodes_number_ranks_node_by_node() -> None:
    cluster = load_cluster(str(ROOT / "examples/clusters/unequal_nodes.yaml"))
    assert cluster.num_devices == 14
    assert cluster.devices[2] == (1, 0, "a100-40gb")
    assert cluster.ranks_of_kind("a100-80gb") == tuple(range(6, 14))
    assert cluster.link(0, 1).source == "catalogue"
    assert cluster.link(0, 13).bandwidth_bytes_per_s == 12.5e9


def test_capacity_is_memory_less_reserve_or_what_is_free() -> None:
    cluster = load_cluster(str(ROOT / "examples/clusters/three_vendors.yaml"))
    assert cluster.kinds["vendor-b"].capacity_bytes == 60 * 1024**3
    assert cluster.link(0, 5).kind == "relay"


def test_missing_links_are_assumed_and_say_so() -> None:
    text = "nodes: [{device: c500, num_devices: 2}, {device: c500, num_devices: 2}]"
    cluster = parse_cluster(text, source="x.yaml")
    assert cluster.link(0, 2).source == "assumed"
    assert [node.name for node in cluster.nodes] == ["node0", "node1"]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("nodes:\n  - {device: a100-80g, num_devices: 4}\n", "x.yaml:2", "a100-80gb"),
        ("nodes:\n  - {device: a100-80gb, num_device: 4}\n", "x.yaml:2", "num_devices"),
        ("nodes:\n  - {device: a100-80gb, num_devices: 0}\n", "x.yaml:2", "minimum"),
        ("nodes:\n  - {device: [\n", "x.yaml:3", "not YAML"),
        ("{}\n", "x.yaml:1", "nodes"),
        ("[1, 2]\n", "x.yaml:1", "object"),
        (
            "nodes:\n  - {device: mine, num_devices: 2}\ndevices:\n  mine: {platform: cuda}\n",
            "x.yaml:4",
            "lacks memory_bytes",
        ),
        (
            "nodes:\n  - {device: mine, num_devices: 2}\n"
            "devices:\n  mine: {like: a100-80gb, memory_bytes: 80 parsecs}\n",
            "x.yaml:4",
            "not a size",
        ),
        (
            "nodes:\n  - {device: c500, num_devices: 2}\n"
            "links:\n  - {where: inter-node, between: [c500, h100], bandwidth_bytes_per_s: 1e9}\n",
            "x.yaml:4",
            "no node has device kind",
        ),
        (
            "nodes:\n  - {device: c500, num_devices: 2}\n"
            "links:\n  - {where: inter-node, between: [c500], bandwidth_bytes_per_s: 200}\n",
            "x.yaml:4",
            "Gbit",
        ),
        (
            "nodes:\n  - {name: a, device: c500, num_devices: 2}\n"
            "  - {name: a, device: c500, num_devices: 2}\n",
            "x.yaml",
            "two nodes",
        ),
    ],
)
def test_errors_name_the_line(text: str, place: str, words: str) -> None:
    with pytest.raises(BadInputError) as error:
        parse_cluster(text, source="x.yaml")
    assert error.value.message.startswith(place)
    assert words in str(error.value)
    assert error.value.flag == "--memx-cluster"


def test_a_missing_file_is_an_error_not_a_local_run() -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        load_cluster("/nowhere/cluster.yaml")


def test_yaml_tags_make_no_objects() -> None:
    with pytest.raises(BadInputError):
        parse_cluster("!!python/object/apply:os.system ['true']", source="x.yaml")


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_the_catalogue_has_sources_and_sane_figures() -> None:
    kinds = catalogue()
    assert len(kinds) > 25
    for name, kind in kinds.items():
        assert kind.source.startswith("catalogue"), name
        assert 8 * 1024**3 <= kind.memory_bytes <= 400 * 1024**3
        assert 1e13 < max(kind.peak_flops.values()) < 1e16
    a100 = kinds["a100-80gb"]
    assert a100.flops("bf16") == 312e12
    assert a100.flops("fp32") == 156e12
