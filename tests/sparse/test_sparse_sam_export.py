"""What is written, held against what SAM's own generator reads, restated."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from tilestream.sparse.dot import from_dot, to_dot
from tilestream.sparse.dot.text import parse
from tilestream.sparse.kernels import DCSR, elementwise, hashed, matmul, sddmm
from tilestream.sparse.program import compile_einsum
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import pack

ORDERS = ("ijk", "ikj", "jik", "jki", "kij", "kji")
NEEDED = {
    "fiberlookup": ("tensor", "index", "mode", "format", "root"),
    "repeat": ("tensor", "index", "root"),
    "repsiggen": ("index",),
    "arrayvals": ("tensor",),
    "intersect": ("index",),
    "union": ("index",),
    "spaccumulator": ("order", "in0"),
    "crddrop": ("outer", "inner"),
    "crdhold": ("outer", "inner"),
    "mul": (),
    "add": (),
    "reduce": (),
    "fiberwrite": ("tensor", "mode", "sink"),
}
"""The types that SAM's generator knows, and what it reads of each (it stops where something is missing)."""


@dataclass
class Generated:
    """A graph as SAM's generator sees it: attributes by node, (from, to, label) edges without broadcasts."""

    nodes: dict[str, dict[str, str]]
    edges: list[tuple[str, str, str]]


def as_sams_generator_reads(text: str) -> Generated:
    """What SAM's generator gets from a file: formats from its second line, attributes from the nodes' comments, each
    split at commas and each part at its one equals sign, and labels of edges, broadcasts being passed through."""
    formats = text.splitlines()[1].split('"')[1]
    assert all(len(part.split("=")) == 2 for part in formats.split(","))
    dot = parse(text)
    assert all(name.isidentifier() or name.isdigit() for name in dot.nodes), "names become parts of variables"
    nodes = {name: dict(part.split("=") for part in attrs["comment"].split(",")) for name, attrs in dot.nodes.items()}
    edges = [(a, b, attrs["label"]) for a, b, attrs in dot.edges]
    while copies := [name for name, attrs in nodes.items() if attrs["type"] == "broadcast"]:
        (source,) = [a for a, b, _ in edges if b == copies[0]]
        edges = [(source if a == copies[0] else a, b, label) for a, b, label in edges if b != copies[0]]
        del nodes[copies[0]]
    return Generated(nodes, edges)


def room(size: str) -> None:
    """Sums of products of numbers and dimensions, a dimension being a letter and a digit and then anything."""
    for factor in re.split(r"[+*]", size):
        assert re.fullmatch(r"\d|[A-Za-z]\d_dim", factor), size


@pytest.mark.parametrize(
    "kernel",
    [
        elementwise("mul"),
        elementwise("add"),
        sddmm("product"),
        *map(matmul, ORDERS),
    ],
    ids=lambda k: k.graph.name,
)
def test_sams_generator_takes_what_is_written(kernel):
    text = to_dot(kernel.graph, {**kernel.formats, kernel.result: kernel.format})
    assert text.splitlines()[1].split('"')[1].startswith("X="), "the first tensor is the result"
    got = as_sams_generator_reads(text)
    for name, attrs in got.nodes.items():
        kind = attrs["type"]
        assert kind in NEEDED and not [x for x in NEEDED[kind] if not attrs.get(x)], (name, attrs)
        before = [(a, label) for a, b, label in got.edges if b == name]
        assert attrs.get("root", "false") in ("true", "false")
        if kind in ("fiberlookup", "repeat"):
            assert len(before) == {"fiberlookup": 1, "repeat": 2}[kind] - (attrs["root"] == "true")
        if kind in ("intersect", "union"):
            # Coordinates and references of an operand come from one node, whose tensor says which output is whose.
            parents = [a for a, _ in before]
            assert sorted(label.split("_")[0] for _, label in before) == ["crd", "crd", "ref", "ref"]
            assert all(parents.count(a) == 2 and got.nodes[a]["tensor"] for a in parents)
            operands = {got.nodes[a]["tensor"] for a in parents}
            readers = {got.nodes[b]["tensor"] for a, b, label in got.edges if a == name and label.startswith("ref")}
            assert readers <= operands and len(operands) == 2
        if kind == "repsiggen":
            assert [label for _, label in before] in (["crd"], ["ref"])
        if kind == "repeat":
            assert {label.split("_")[0] for _, label in before} <= {"repsig", "ref"}
        if kind == "spaccumulator":
            assert attrs["order"] in "12"
            sides = [label.split("-")[0] for _, label in before if label.startswith("crd")]
            assert {"crd_inner", "crd_outer"} <= set(sides) and len(sides) == int(attrs["order"]) + 1
            (innermost,) = [label for _, label in before if label.startswith("crd_inner")]
            assert innermost[-1] == attrs["in0"] and "val" in [label for _, label in before]
        if kind in ("reduce", "mul", "add"):
            assert [label for _, label in before] == ["val"] * (1 if kind == "reduce" else 2)
        if kind == "fiberwrite" and attrs["mode"] == "vals":
            room(attrs["size"])
        elif kind == "fiberwrite":
            room(attrs["segsize"])
            room(attrs["crdsize"])


def test_names_that_sams_comments_cannot_hold():
    """A view of a tensor in another order has a comma in its name, which separates attributes in a comment."""
    operands = [pack(name, hashed(4, 2, seed), DCSR) for seed, name in enumerate("BC")]
    program = compile_einsum("ik,kj->ij", operands, Schedule(order=("j", "k", "i")))
    (region,) = program.regions
    assert any("," in tensor for tensor in region.inputs)
    kept = {name: form for name, (_, form) in region.inputs.items()} | {n: f for n, (_, f) in region.outputs.items()}
    text = to_dot(region.graph, kept)
    as_sams_generator_reads(text)
    assert from_dot(text).formats == kept
    again, ours = ({replace(node, source="") for node in g.nodes} for g in (from_dot(text).graph, region.graph))
    assert again == ours
