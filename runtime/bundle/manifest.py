"""A bundle on disk: the manifest, read and written. docs/format.md specifies it; this file is its first reader."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..accept import METRICS
from ..errors import BundleError
from .engine_info import EngineInfo, read_engine
from .fields import Fields
from .files import FileEntry, is_safe_name, verify
from .turns import ChatTurns, read_chat_turns

FORMAT_VERSION = "1.1"
MANIFEST_FILE, CHECKSUM_FILE = "manifest.json", "manifest.sha256"
MANIFEST_LIMIT = 16_000_000  # bytes
BACKENDS = ("onnx", "tensorrt", "tensorrt_rtx")
KV_LAYOUTS = ("static", "delta")
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4", "w8a8")
KV_DTYPES = ("float32", "float16", "bfloat16")
OUTPUTS = ("token_ids", "confidence", "margin", "entropy", "logits")

# The fields of `model` and the largest value of each that is taken seriously: a reader allocates from these numbers.
MODEL_LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "context_length": 2**31,
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Dimensions that a runtime needs to allocate KV buffers and check token ids."""

    type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Special token ids."""

    mask: int
    eos: tuple[int, ...]
    pad: int


@dataclass(frozen=True, slots=True)
class TextInfo:
    """How text becomes token ids. `tokenizer` is a file of the bundle; `chat_template` is jinja2, `chat` the same without it."""

    tokenizer: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    chat: ChatTurns | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """What the export self-check found between a variant and its checkpoint, over `positions` predictions.

    `acceptance_flips`: for some taus, how many predictions pass in one and not in the other. `yardstick`: what the
    checkpoint's own logits were proven against, such as "transformers 5.23.0"; None for the exporter's reading alone.
    """

    positions: int
    argmax_matches: int
    max_logit_error: float
    max_confidence_error: float
    acceptance_flips: Mapping[str, int] | None = None
    yardstick: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """How the weights of a variant are stored. `block_size` inputs share a scale, None: one scale for each output channel."""

    block_size: int | None
    symmetric: bool
    head: str
    embedding: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One executable form of the model. `batch`, `slots` and `capacity` are None where the graph keeps them symbolic.

    `accuracy_level` is the one that `drift` was measured at, for weight-only int4 and int8 on ONNX Runtime. `engine` is set for
    the TensorRT backends and for no other.
    """

    name: str
    backend: str
    file: str
    weights: str | None
    precision: str
    kv_dtype: str
    kv_layout: str
    outputs: tuple[str, ...]
    batch: int | None = None
    slots: int | None = None
    capacity: int | None = None
    drift: Drift | None = None
    quantization: QuantizationInfo | None = None
    accuracy_level: int | None = None
    engine: EngineInfo | None = None

    @property
    def is_static(self) -> bool:
        return self.slots is not None

    @property
    def is_engine(self) -> bool:
        return self.backend != "onnx"


@dataclass(frozen=True, slots=True)
class Profile:
    """A calibrated tau for a task, valid for the one graph and weights it was measured on (`*_sha256`; None: not known).

    `window` is the most predictions of a step, None for the bundle's block. `evidence` says what the choice rests on.
    """

    name: str
    tau: float
    metric: str
    variant: str
    variant_sha256: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    weights_sha256: str | None = None
    precision: str | None = None
    window: int | None = None
    accuracy_level: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a runtime knows about a bundle before it opens a graph."""

    producer: str
    source: str
    revision: str | None
    model: ModelInfo
    block: int
    tokens: TokenInfo
    text: TextInfo | None
    variants: tuple[Variant, ...]
    files: tuple[FileEntry, ...]
    profiles: tuple[Profile, ...] = ()
    format_version: str = FORMAT_VERSION

    def to_json(self) -> str:
        """The manifest as canonical JSON text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: a directory whose manifest is valid and whose files are the ones it lists."""

    path: Path
    manifest: Manifest

    def variant(self, name: str) -> Variant:
        for variant in self.manifest.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.manifest.variants)
        raise BundleError(f"{self.path}: no variant `{name}` (there are: {known})")


def open_bundle(path: str | Path, *, full: bool = False) -> Bundle:
    """Open and check a bundle directory. `full` hashes every file even if it was found good before.

    Raises BundleError with everything that is wrong: not a bundle, a newer format, a bad manifest, unsafe file names,
    files that are missing, of the wrong size or of the wrong content.
    """
    directory = Path(path).expanduser()
    file = directory / MANIFEST_FILE
    if not file.is_file():
        what = "not a bundle: it has no manifest.json" if directory.is_dir() else "no such bundle"
        raise BundleError(f"{path}: {what}; make one with `mars-export onnx CHECKPOINT -o {path}`")
    if file.stat().st_size > MANIFEST_LIMIT:
        raise BundleError(f"{file}: larger than {MANIFEST_LIMIT} bytes; this is not a manifest")
    try:
        manifest = parse_manifest(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: not readable ({error})") from error
    if _checksum_line(file.read_bytes()) not in _read_checksums(directory):
        raise BundleError(
            f"{directory}: {MANIFEST_FILE} does not match {CHECKSUM_FILE}; copy or export the bundle again"
        )
    verify(directory, manifest.files, full=full)
    return Bundle(directory, manifest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` and its checksum, each by renaming a finished file.

    Two renames cannot be one, so the checksum file vouches for the old and the new manifest while they change places: a
    crash at any point leaves a bundle that opens.
    """
    data = manifest.to_json().encode("utf-8")
    if len(data) > MANIFEST_LIMIT:
        raise BundleError(
            f"{directory}: the manifest would be larger than {MANIFEST_LIMIT} bytes; remove profiles that are no longer needed"
        )
    fresh = _checksum_line(data)
    present = (
        _checksum_line((directory / MANIFEST_FILE).read_bytes())
        if (directory / MANIFEST_FILE).is_file()
        else ""
    )
    try:
        _replace(directory / CHECKSUM_FILE, (present + fresh).encode("ascii"))
        _replace(directory / MANIFEST_FILE, data)
        _replace(directory / CHECKSUM_FILE, fresh.encode("ascii"))
    except OSError as error:
        raise BundleError(
            f"{directory}: the manifest cannot be written ({error.strerror}); nothing is damaged"
        ) from error


def _replace(path: Path, content: bytes) -> None:
    """Put `content` in place of a file, whole or not at all, and on the disk before anything that follows."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _checksum_line(data: bytes) -> str:
    """What `sha256sum manifest.json` prints."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST_FILE}\n"


def _read_checksums(directory: Path) -> list[str]:
    """The lines of the checksum file: one, or two where a rewrite was interrupted."""
    try:
        return (
            (directory / CHECKSUM_FILE)
            .read_bytes()[:1000]
            .decode("ascii", "replace")
            .splitlines(keepends=True)
        )
    except OSError:
        return []


def parse_manifest(text: str, where: str = MANIFEST_FILE) -> Manifest:
    """Parse and validate manifest text; raises BundleError that lists every wrong field."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where}: not valid JSON ({error}); copy or export the bundle again") from error
    problems: list[str] = []
    top = Fields(value, where, problems)
    _check_version(top)
    manifest = _read_manifest(top)
    if not problems:
        problems += _contradictions(manifest, where)
    if problems:
        raise BundleError(f"{len(problems)} problems in the manifest:\n  " + "\n  ".join(problems[:20]))
    return manifest


def _check_version(top: Fields) -> None:
    version = top.value.get("format_version")
    major = version.split(".")[0] if isinstance(version, str) else ""
    ours = FORMAT_VERSION.split(".")[0]
    if not major.isdecimal():
        raise BundleError(f"{top.where}: no `format_version`; this is not a mars-export bundle")
    if int(major) != int(ours):
        side = (
            "update mars-export"
            if int(major) > int(ours)
            else "export the bundle again with this mars-export"
        )
        raise BundleError(f"{top.where}: bundle format {version}, this runtime reads {ours}.x: {side}")


def _read_manifest(top: Fields) -> Manifest:
    model, tokens = top.object("model"), top.object("tokens")
    info = ModelInfo(
        model.text("type"),
        *(model.integer(name, 1, high) for name, high in MODEL_LIMITS.items()),
    )
    last = info.vocab_size - 1
    return Manifest(
        producer=top.text("producer"),
        source=top.text("source"),
        revision=top.optional_text("revision"),
        model=info,
        block=top.integer("block", 1, 4096),
        tokens=TokenInfo(
            tokens.integer("mask", 0, last), tokens.integers("eos", last), tokens.integer("pad", 0, last)
        ),
        text=_read_text(top.object("text")) if top.value.get("text") is not None else None,
        variants=tuple(_read_variant(f) for f in top.objects("variants")),
        files=tuple(
            FileEntry(f.text("path"), f.integer("size"), f.text("sha256")) for f in top.objects("files")
        ),
        profiles=tuple(_read_profile(f) for f in top.objects("profiles")),
        format_version=top.text("format_version"),
    )


def _read_text(fields: Fields) -> TextInfo:
    return TextInfo(
        fields.text("tokenizer"),
        fields.optional_text("chat_template"),
        fields.optional_text("bos_token"),
        fields.optional_text("eos_token"),
        read_chat_turns(fields.object("chat")) if fields.value.get("chat") is not None else None,
    )


def _read_variant(fields: Fields) -> Variant:
    outputs = fields.texts("outputs")
    if not {"token_ids", "confidence"} <= set(outputs) <= set(OUTPUTS):
        fields.wrong("outputs", f"token_ids and confidence are needed, and known are {', '.join(OUTPUTS)}")
    return Variant(
        name=fields.text("name"),
        backend=fields.text("backend", BACKENDS),
        file=fields.text("file"),
        weights=fields.optional_text("weights"),
        precision=fields.text("precision", PRECISIONS),
        kv_dtype=fields.text("kv_dtype", KV_DTYPES),
        kv_layout=fields.text("kv_layout", KV_LAYOUTS),
        outputs=outputs,
        batch=fields.optional_integer("batch", 1),
        slots=fields.optional_integer("slots", 1),
        capacity=fields.optional_integer("capacity", 1),
        drift=_read_drift(fields.object("drift")) if fields.value.get("drift") is not None else None,
        quantization=_read_quantization(fields.object("quantization"))
        if fields.value.get("quantization") is not None
        else None,
        accuracy_level=fields.optional_integer("accuracy_level", 0),
        engine=read_engine(fields.object("engine")) if fields.value.get("engine") is not None else None,
    )


def _read_drift(fields: Fields) -> Drift:
    return Drift(
        fields.integer("positions"),
        fields.integer("argmax_matches"),
        fields.number("max_logit_error"),
        fields.number("max_confidence_error"),
        _read_flips(fields.object("acceptance_flips"))
        if fields.value.get("acceptance_flips") is not None
        else None,
        fields.optional_text("yardstick"),
    )


def _read_flips(fields: Fields) -> dict[str, int]:
    return {tau: fields.integer(tau) for tau in fields.value}


def _read_quantization(fields: Fields) -> QuantizationInfo:
    return QuantizationInfo(
        fields.optional_integer("block_size", 1),
        fields.boolean("symmetric"),
        fields.text("head"),
        fields.text("embedding"),
    )


def _read_profile(fields: Fields) -> Profile:
    evidence = fields.object("evidence")
    return Profile(
        fields.text("name"),
        fields.number("tau"),
        fields.text("metric", METRICS),
        fields.text("variant"),
        fields.text("variant_sha256"),
        evidence.value,
        fields.optional_text("weights_sha256"),
        fields.optional_text("precision"),
        fields.optional_integer("window", 1),
        fields.optional_integer("accuracy_level", 0),
    )


def _contradictions(manifest: Manifest, where: str) -> list[str]:
    listed = {entry.path for entry in manifest.files}
    problems = [
        f"{where}.files: `{path[:80]}` is not a plain file name"
        for path in sorted(listed)
        if not is_safe_name(path)
    ]
    used = {v.file: f"variant {v.name}" for v in manifest.variants} | {
        v.weights: f"variant {v.name}" for v in manifest.variants if v.weights
    }
    used |= {v.engine.graph: f"variant {v.name}" for v in manifest.variants if v.engine is not None}
    if manifest.text is not None:
        used[manifest.text.tokenizer] = "text"
    problems += [
        f"{where}: {user} uses `{path[:80]}`, which `files` does not list"
        for path, user in used.items()
        if path not in listed
    ]
    problems += [
        f"{where}.files: `{path[:80]}` is listed twice"
        for path in sorted(listed)
        if sum(e.path == path for e in manifest.files) > 1
    ]
    names = [v.name for v in manifest.variants]
    problems += [
        f"{where}.variants: `{name}` is there twice" for name in sorted(set(names)) if names.count(name) > 1
    ]
    problems += [
        f"{where}: profile `{p.name}` is for variant `{p.variant}`, which is not there"
        for p in manifest.profiles
        if p.variant not in names
    ]
    model = manifest.model
    if model.num_heads % model.num_kv_heads:
        problems.append(
            f"{where}.model: {model.num_heads} heads cannot share {model.num_kv_heads} key/value heads"
        )
    if not manifest.variants:
        problems.append(f"{where}.variants: empty: nothing to run")
    if manifest.tokens.mask in manifest.tokens.eos:
        problems.append(f"{where}.tokens: the mask token cannot end a sequence")
    return problems
