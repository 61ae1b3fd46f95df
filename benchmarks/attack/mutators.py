"""Makes a valid bundle hostile, in a way that is drawn from a seed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**53 + 1, 2**64, 10**400, 0.5, -0.0, 1e308),
    *("", "a", "..", "/etc/passwd", "model.onnx", "weights.bin", "é", "\ud800", "x" * 10_000, "\x1b[2J[/x]"),
    *("0.9", "1.2", [], {}, [[]], {"a": 1}, [0] * 1000, ["a", 1]),
)
PIECES = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m.role == 'user' %}",
    "{% else %}",
    "{% endif %}",
    "{{ m.content }}",
    "{{ messages[0].content }}",
    "{{ ''.__class__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y') }}",
    "{% include 'x' %}",
    "{% set y = messages[::-1] %}",
    "{{",
    "%}",
    "{{ (" + "(" * 60,
    "{{ [1] | sum(start=[]) }}",
    "text",
    "\n",
    "{{ bos_token }}",
    "{# note #}",
)

Mutator = Callable[[Path, random.Random], None]


def manifest_field(bundle: Path, draw: random.Random) -> None:
    """One to three fields anywhere in the manifest take another value, go, or move."""
    value = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    for _ in range(draw.randint(1, 3)):
        change(value, draw)
    _write_manifest(bundle, json.dumps(value))


def manifest_bytes(bundle: Path, draw: random.Random) -> None:
    data = (bundle / "manifest.json").read_bytes()
    (bundle / "manifest.json").write_bytes(damaged(data, draw))
    if draw.random() < 0.8:
        _vouch(bundle)


def file_bytes(bundle: Path, draw: random.Random) -> None:
    name = draw.choice(["model.onnx", "weights.bin", "tokenizer.json", "manifest.sha256"])
    (bundle / name).write_bytes(damaged((bundle / name).read_bytes(), draw))
    if name != "manifest.sha256" and draw.random() < 0.9:
        rehash(bundle)


def graph(bundle: Path, draw: random.Random) -> None:
    """A graph that is still a protobuf: nodes, attributes, shapes and external data changed."""
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    for _ in range(draw.randint(1, 3)):
        _change_graph(model, draw)
    (bundle / "model.onnx").write_bytes(model.SerializeToString())
    rehash(bundle)


def tokenizer(bundle: Path, draw: random.Random) -> None:
    value = json.loads((bundle / "tokenizer.json").read_text(encoding="utf-8"))
    for _ in range(draw.randint(1, 2)):
        change(value, draw)
    if draw.random() < 0.3:
        kind = draw.choice(
            ["Strip", "Replace", "Metaspace", "ByteFallback", "WordPiece", "CTC", "Fuse", "BPEDecoder"]
        )
        value["decoder"] = {
            "type": kind,
            "content": draw.choice(["a", "é", ""]),
            "start": draw.randint(0, 9),
            "stop": draw.randint(0, 9),
            "pattern": {"String": draw.choice(["a", ""])},
            "replacement": "a",
            "prefix": "##",
            "suffix": "",
            "cleanup": True,
            "add_prefix_space": True,
            "prepend_scheme": "always",
            "pad_token": "a",
            "word_delimiter_token": "|",
        }
    (bundle / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    rehash(bundle)


def template(bundle: Path, draw: random.Random) -> None:
    value = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    value["text"]["chat"] = None
    value["text"]["chat_template"] = "".join(draw.choices(PIECES, k=draw.randint(1, 12)))
    _write_manifest(bundle, json.dumps(value))


def side_files(bundle: Path, draw: random.Random) -> None:
    """Something else in the place of a file: nothing, a directory, a pipe, a device, a link, a huge hole."""
    names = ["manifest.json", "manifest.sha256", "model.onnx", "weights.bin", "tokenizer.json"]
    misplaced(bundle / draw.choice(names), draw)


def misplaced(path: Path, draw: random.Random) -> None:
    """Something else in the place of a file, which may lie beside it then."""
    old = path.rename(path.with_name("moved"))
    match draw.randint(0, 6):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(old.name)
        case 4:
            path.symlink_to(path.name)
        case 5:
            with path.open("wb") as file:
                file.truncate(6 << 30)


MUTATORS: dict[str, Mutator] = {
    f.__name__: f
    for f in (manifest_field, manifest_bytes, file_bytes, graph, tokenizer, template, side_files)
}


def mutate(bundle: Path, seed: int) -> str:
    """Make the bundle hostile; returns how."""
    draw = random.Random(seed)
    name = draw.choice(list(MUTATORS))
    MUTATORS[name](bundle, draw)
    return name


def rehash(bundle: Path) -> None:
    """Sizes, hashes and the checksum as the files are now: an author of a bundle can always do that."""
    value = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    for entry in value["files"]:
        data = (bundle / entry["path"]).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _write_manifest(bundle, json.dumps(value))


def _write_manifest(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_text(text, encoding="utf-8")
    _vouch(bundle)


def _vouch(bundle: Path) -> None:
    digest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    (bundle / "manifest.sha256").write_text(f"{digest}  manifest.json\n", encoding="ascii")


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bits flipped, an end cut off, bytes put in, or a piece copied over another."""
    changed = bytearray(data)
    at = draw.randrange(len(data))
    match draw.randint(0, 3):
        case 0:
            for _ in range(draw.randint(1, 8)):
                changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = draw.randbytes(draw.randint(1, 40))
        case 3:
            changed[at : at + 200] = changed[draw.randrange(len(data)) :][:200]
    return bytes(changed)


def change(value: Any, draw: random.Random) -> None:
    """One place of a JSON value changes in place."""
    places = []
    rest = [value]
    while rest:
        inner = rest.pop()
        keys = (
            list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        )
        places += [(inner, key) for key in keys]
        rest += [inner[key] for key in keys if isinstance(inner[key], dict | list)]
    if not places:
        return
    holder, key = draw.choice(places)
    match draw.randint(0, 5):
        case 0:
            del holder[key]
        case 1:
            other, from_there = draw.choice(places)
            if from_there in (other if isinstance(other, dict) else range(len(other))):
                holder[key] = json.loads(json.dumps(other[from_there]))
        case 2 if isinstance(holder[key], list):
            holder[key] += holder[key] * draw.randint(1, 300)
        case _:
            holder[key] = copy.deepcopy(draw.choice(NASTY))  # what is changed later must not be NASTY itself


def _change_graph(model: onnx.ModelProto, draw: random.Random) -> None:
    nodes, weights = model.graph.node, model.graph.initializer
    node = draw.choice(nodes)
    match draw.randint(0, 9):
        case 0:
            node.op_type = draw.choice(
                ["Identity", "Loop", "Reshape", "Expand", "Tile", "Range", "NonZero", "X"]
            )
        case 1 if node.attribute:
            attribute = draw.choice(node.attribute)
            attribute.i = draw.choice([0, -1, 2**31, 2**62])
            attribute.ints[:] = [draw.choice([0, -1, 3, 2**40])] * draw.randint(0, 5)
        case 2 if node.input:
            node.input[draw.randrange(len(node.input))] = draw.choice(
                ["", "input_ids", "nowhere", draw.choice(nodes).output[0]]
            )
        case 3:
            nodes.remove(node)
        case 4:
            nodes.append(node)
        case 5:
            weight = draw.choice(weights)
            weight.dims[:] = [draw.choice([0, -1, 1, 3, 2**20, 2**40])] * draw.randint(0, 4)
        case 6:
            entries = [e for w in weights for e in w.external_data]
            if entries:
                draw.choice(entries).value = draw.choice(
                    ["", "0", "-1", "99999999999", "../x", "/dev/zero", "manifest.json"]
                )
        case 7:
            shape = draw.choice([*model.graph.input, *model.graph.output]).type.tensor_type.shape
            if shape.dim:
                draw.choice(shape.dim).dim_value = draw.choice([0, 1, 7, 2**40])
        case 8:
            draw.choice(weights).data_type = draw.randint(0, 25)
        case 9:
            model.opset_import[0].version = draw.choice([1, 7, 30, 2**40])
