"""The manifest: its fields, and how its text is read. docs/format.md specifies it; this file is its first
reader.

Knows no directory: open.py has the bundle as it lies on disk.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from ..accept import METRICS
from ..errors import BundleError, listed
from .engine_info import EngineInfo
from .fields import Reader, Rule, parse
from .files import MANIFEST_FILE, FileEntry, is_safe_name
from .stored_grammar import StoredGrammar
from .turns import ChatTurns

FORMAT_VERSION = "1.2"
OLD_W8A8 = (
    "7 is expected for w8a8: many processors compute products of 8-bit weights wrong; export the checkpoint"
    " again: mars-export onnx CHECKPOINT --precision w8a8"
)
NEAR_TIES = "exact mode gives the text of one token a step, except for near ties (docs/decoding.md)"
BACKENDS = ("onnx", "tensorrt", "tensorrt_rtx")
KV_DTYPES = ("float32", "float16", "bfloat16")
KV_LAYOUTS = ("static", "delta")
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4", "w8a8")
OUTPUTS = ("token_ids", "confidence", "margin", "entropy", "topk_ids", "topk_logprobs", "logits")
VERSION = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?(?![0-9])")

Count = Annotated[int, Rule(1)]
TokenId = Annotated[int, Rule(below="model.vocab_size")]
WindowSize = int | Literal["auto", "full"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Dimensions that a runtime needs to allocate KV buffers and check token ids; it allocates from them,
    hence the limits.
    """

    type: str
    vocab_size: Annotated[int, Rule(1, 2**24)]
    hidden_size: Annotated[int, Rule(1, 2**20)]
    num_layers: Annotated[int, Rule(1, 2**12)]
    num_heads: Annotated[int, Rule(1, 2**16)]
    num_kv_heads: Annotated[int, Rule(1, 2**16)]
    head_dim: Annotated[int, Rule(1, 2**16)]
    context_length: Annotated[int, Rule(1, 2**31)]

    def entry_bytes(self, kv_dtype: str) -> int:
        """What the KV entries of one token take."""
        number = 4 if kv_dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * number


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Special token ids."""

    mask: TokenId
    eos: tuple[TokenId, ...]
    pad: TokenId


@dataclass(frozen=True, slots=True)
class TextInfo:
    """How text becomes token ids.

    `tokenizer` is a file of the bundle; `chat_template` is jinja2, `chat` the same without it.
    """

    tokenizer: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    chat: ChatTurns | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """What the export self-check found between a variant and its checkpoint, over `positions` predictions.

    `acceptance_flips`: for some taus, how many predictions pass in one and not in the other. `yardstick`:
    what the checkpoint's own logits were proven against, such as "transformers 5.23.0"; None for the
    exporter's reading alone.
    """

    positions: int
    argmax_matches: int
    max_logit_error: float
    max_confidence_error: float
    acceptance_flips: Mapping[str, int] | None = None
    yardstick: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizerInfo:
    """What chose the codes: "round", "gptq", or "checkpoint" for codes that were there.

    `text_sha256` is that of the calibration text, of which `sequences` with so many `tokens` were used.
    """

    name: str
    text_sha256: str | None = None
    sequences: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """How the weights of a variant are stored.

    `group_size` inputs share a scale, None: one scale for each output channel. `weight_bits` is that of the
    codes of Linear weights: 7 in w8a8, where two byte products must fit in 16 bits. `quantizer` None: not
    known.
    """

    group_size: Annotated[int | None, Rule(1)]
    symmetric: bool
    head: str
    embedding: str
    quantizer: QuantizerInfo | None = None
    weight_bits: int | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One executable form of the model.

    `batch`, `slots` and `capacity` are None where the graph keeps them symbolic.

    `accuracy_level` is the one that `drift` was measured at, for weight-only int4 and int8 on ONNX Runtime.
    `engine` is set for the TensorRT backends and for no other.
    """

    name: str
    backend: Annotated[str, Rule(choices=BACKENDS)]
    file: str
    weights: str | None
    precision: Annotated[str, Rule(choices=PRECISIONS)]
    kv_dtype: Annotated[str, Rule(choices=KV_DTYPES)]
    kv_layout: Annotated[str, Rule(choices=KV_LAYOUTS)]
    outputs: Annotated[tuple[str, ...], Rule(most=16)]
    batch: Annotated[int | None, Rule(1)] = None
    slots: Annotated[int | None, Rule(1)] = None
    capacity: Annotated[int | None, Rule(1)] = None
    drift: Drift | None = None
    quantization: QuantizationInfo | None = None
    accuracy_level: int | None = None
    engine: EngineInfo | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether it was made for one number of rows and slots."""
        return self.slots is not None

    @property
    def has_near_ties(self) -> bool:
        """Whether predictions depend on the width of a step by more than the order of fp32 sums, on a CPU:
        exact mode then gives the one-token text except where two tokens are nearly as likely.
        """
        if self.precision == "int8" and self.quantization is not None:
            return self.kv_dtype != "float32" or self.quantization.group_size != 32
        return self.precision not in ("float32", "w8a8")

    @property
    def is_engine(self) -> bool:
        return self.backend != "onnx"

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What contradicts itself in a variant that was read."""
        if not {"token_ids", "confidence"} <= set(self.outputs) <= set(OUTPUTS):
            yield "outputs", f"token_ids and confidence are needed, and known are {', '.join(OUTPUTS)}"
        elif ("topk_ids" in self.outputs) != ("topk_logprobs" in self.outputs):
            yield "outputs", "topk_ids and topk_logprobs are there together or not at all"
        if self.precision == "w8a8" and (self.quantization is None or self.quantization.weight_bits != 7):
            yield "quantization.weight_bits", OLD_W8A8


@dataclass(frozen=True, slots=True)
class Profile:
    """A calibrated tau for a task, valid for the one graph and weights it was measured on (`*_sha256`; None:
    not known).

    `window` is the most predictions of a step: "auto", "full" (the bundle's block) or their number.
    `evidence` says what the choice rests on.
    """

    name: str
    tau: float
    metric: Annotated[str, Rule(choices=METRICS)]
    variant: str
    variant_sha256: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    weights_sha256: str | None = None
    precision: str | None = None
    window: Annotated[WindowSize, Rule(1, absent="full")] = "full"
    accuracy_level: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a runtime knows about a bundle before it opens a graph."""

    producer: str
    source: str
    revision: str | None
    model: ModelInfo
    block: Annotated[int, Rule(1, 4096)]
    tokens: TokenInfo
    text: TextInfo | None
    variants: Annotated[tuple[Variant, ...], Rule(most=64)]
    files: Annotated[tuple[FileEntry, ...], Rule(most=1000)]
    profiles: Annotated[tuple[Profile, ...], Rule(most=10_000)] = ()
    grammars: Annotated[tuple[StoredGrammar, ...], Rule(absent=(), most=256)] = ()
    format_version: str = FORMAT_VERSION

    def to_json(self) -> str:
        """The manifest as canonical JSON text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @property
    def graphs(self) -> frozenset[str]:
        """The files that are ONNX graphs."""
        graphs = (
            v.engine.graph if v.engine is not None else v.file
            for v in self.variants
            if v.engine or not v.is_engine
        )
        return frozenset(graphs)


def parse_manifest(text: str, where: str = MANIFEST_FILE) -> Manifest:
    """Parse and validate manifest text; raises BundleError that lists every wrong field."""
    try:
        value = parse(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where}: not valid JSON ({error}); copy or export the bundle again") from error
    _check_version(value.get("format_version") if isinstance(value, dict) else None, where)
    problems: list[str] = []
    manifest = Reader(problems).read(Manifest, value, where)
    if not problems:
        problems += _contradictions(manifest, where)
    if problems:
        raise BundleError(f"{len(problems)} problems in the manifest:{listed(problems)}")
    return manifest


def _check_version(version: Any, where: str) -> None:
    found = VERSION.match(version) if isinstance(version, str) else None
    ours = int(FORMAT_VERSION.split(".")[0])
    if found is None:
        raise BundleError(f"{where}: no `format_version`; this is not a mars-export bundle")
    if int(found[1]) != ours:
        side = (
            "update mars-export" if int(found[1]) > ours else "export the bundle again with this mars-export"
        )
        raise BundleError(f"{where}: bundle format {version[:20]}, this runtime reads {ours}.x: {side}")


def _contradictions(manifest: Manifest, where: str) -> list[str]:
    counts = Counter(entry.path for entry in manifest.files)
    problems = [
        f"{where}.files: `{path[:80]}` is not a plain file name"
        for path in sorted(counts)
        if not is_safe_name(path)
    ]
    used = {v.file: f"variant {v.name}" for v in manifest.variants}
    used |= {v.weights: f"variant {v.name}" for v in manifest.variants if v.weights}
    used |= {v.engine.graph: f"variant {v.name}" for v in manifest.variants if v.engine is not None}
    if manifest.text is not None:
        used[manifest.text.tokenizer] = "text"
    used |= {g.file: f"grammar {g.name}" for g in manifest.grammars}
    problems += [
        f"{where}: {user} uses `{path[:80]}`, which `files` does not list"
        for path, user in used.items()
        if path not in counts
    ]
    problems += [
        f"{where}.files: `{path[:80]}` is listed twice" for path in sorted(counts) if counts[path] > 1
    ]
    names = Counter(v.name for v in manifest.variants)
    problems += [f"{where}.variants: `{name}` is there twice" for name in sorted(names) if names[name] > 1]
    problems += [
        f"{where}: profile `{p.name}` is for variant `{p.variant}`, which is not there"
        for p in manifest.profiles
        if p.variant not in names
    ]
    grammars = Counter(g.name for g in manifest.grammars)
    problems += [f"{where}: grammar `{n[:60]}` is there twice" for n in sorted(grammars) if grammars[n] > 1]
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
