"""The manifest: its fields, and how its text is read and checked. docs/format.md specifies it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from ..accept import METRICS
from ..errors import BundleError, listed
from ..rules import MASKS, entries, integer, matching, one_of
from .fields import AnyText, FieldParser, parse
from .files import MANIFEST_FILE, FileEntry
from .turns import ChatTurns, ThinkingMarks
from .variant_info import EngineInfo, QuantizationInfo

FORMAT_VERSION = "1.0"
NOT_BATCH_INVARIANT = (
    "not batch-invariant: exact mode gives the text of one token a step, except where two tokens are almost"
    " equally likely (docs/decoding.md)"
)
BACKENDS = ("onnx", "tensorrt", "tensorrt_rtx")
KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
SCALE_BYTES = 2  # after the codes of an int8 entry
KV_LAYOUTS = ("in-place", "appended", "cuda")
INTEGER = ("w8a8", "w4a8")  # precisions whose products are of integers
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4", *INTEGER)
OUTPUTS = ("token_ids", "confidence", "margin", "entropy", "topk_ids", "topk_logprobs", "logits")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_WORDS = "a name of at most 64 letters, digits, dots, dashes and underscores"
GRAMMAR_FILE = re.compile(r"grammar-[0-9a-f]{16}\.dfa")
GRAMMAR_KINDS = ("schema", "tools", "regex", "choice")
VERSION = re.compile(r"([0-9]{1,9})(?:\.|$)")

Name = Annotated[str, matching(NAME, NAME_WORDS)]
Count = Annotated[int | None, integer(1, high=2**53)]


@dataclass(frozen=True, slots=True)
class RecurrentInfo:
    """The layers of a hybrid that keep a state of each row, in float32, instead of KV entries.

    layers: their numbers
    heads, key_dim, value_dim: the shape of a state
    inputs: numbers that a layer keeps of a token that its state does not have yet
    width: tokens before the state of which it keeps them too
    """

    layers: Annotated[tuple[Annotated[int, integer(0, high=2**12)], ...], entries(2**12)]
    heads: Annotated[int, integer(1, high=2**16)]
    key_dim: Annotated[int, integer(1, high=2**16)]
    value_dim: Annotated[int, integer(1, high=2**16)]
    inputs: Annotated[int, integer(1, high=2**24)]
    width: Annotated[int, integer(0, high=2**12)]

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a row's tensors between steps of at most `outputs` outputs, by name suffix."""
        shapes = {
            "inputs": (self.width + outputs, self.inputs),
            "state": (self.heads, self.key_dim, self.value_dim),
        }
        return {f"{i}.{name}": shape for i in self.layers for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Dimensions of the model. A runtime allocates its KV buffers from them, so they have limits.

    `mtp_drafts`: draft tokens of the model's MTP layer in each step; 0 without such a layer. `recurrent`: the
    layers without KV entries, None if there are none. `mtp_shortlist`: the tokens of which the MTP layer
    proposes one; 0: all.
    """

    type: str
    vocab_size: Annotated[int, integer(1, high=2**24)]
    hidden_size: Annotated[int, integer(1, high=2**20)]
    num_layers: Annotated[int, integer(1, high=2**12)]
    num_heads: Annotated[int, integer(1, high=2**16)]
    num_kv_heads: Annotated[int, integer(1, high=2**16)]
    head_dim: Annotated[int, integer(1, high=2**16)]
    context_length: Annotated[int, integer(1, high=2**31)]
    mtp_drafts: Annotated[int, integer(0, high=64)] = 0
    recurrent: RecurrentInfo | None = None
    mtp_shortlist: Annotated[int, integer(0, high=2**24)] = 0

    @property
    def kv_layers(self) -> list[int]:
        """Layers with KV entries. The MTP layer is the last."""
        without = () if self.recurrent is None else self.recurrent.layers
        return [i for i in range(self.num_layers + bool(self.mtp_drafts)) if i not in without]

    @property
    def kv_suffixes(self) -> list[str]:
        """Name suffixes of the KV tensors, after "past_key_values." and "present."."""
        return [f"{i}.{kind}" for i in self.kv_layers for kind in ("key", "value")]

    def entry_width(self, kv_dtype: str) -> int:
        """The numbers of one entry of a head: those of an int8 entry include its scale."""
        return self.head_dim + (SCALE_BYTES if kv_dtype == "int8" else 0)

    def entry_shape(self, kv_dtype: str, kv_layout: str) -> tuple[int, int]:
        """The heads of a row of KV entries (one in the layout "cuda") and the numbers of each in an entry."""
        heads, width = self.num_kv_heads, self.entry_width(kv_dtype)
        return (1, heads * width) if kv_layout == "cuda" else (heads, width)

    def entry_bytes(self, kv_dtype: str) -> int:
        """The bytes of one token's KV entries."""
        number = {"float32": 4, "int8": 1}.get(kv_dtype, 2)
        return 2 * len(self.kv_layers) * self.num_kv_heads * self.entry_width(kv_dtype) * number


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Special token ids. `mask` is None for a model without a mask token: it may predict every token."""

    mask: int | None
    eos: Annotated[tuple[int, ...], entries(100_000)]
    pad: int


@dataclass(frozen=True, slots=True)
class TextInfo:
    """How text becomes token ids.

    `tokenizer` is a file of the bundle. `chat_template` is in the language of jinja2; `chat` is the same
    template as a table. `thinking`: None if the template marks none. `tool_template` takes the template's
    place in requests with tools. `special_tokens` are more variables of the templates. `control_tokens` are
    plain text in messages although the tokenizer does not mark them as special.
    """

    tokenizer: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    chat: ChatTurns | None = None
    thinking: ThinkingMarks | None = None
    tool_template: str | None = None
    special_tokens: Mapping[str, AnyText] = field(default_factory=dict)
    control_tokens: Annotated[tuple[AnyText, ...], entries(100_000)] = ()


@dataclass(frozen=True, slots=True)
class TextDrift:
    """A variant beside its checkpoint on a page of text: of `positions` next tokens the checkpoint and the
    variant predict the same for `matches`. Perplexities are of the page's own tokens.
    """

    positions: int
    matches: int
    perplexity: float
    checkpoint_perplexity: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How far a variant is from its checkpoint, as the export's self-check measured it over `positions`
    predictions.

    `reference_library`: the library that the checkpoint's logits were compared with, such as "transformers
    5.23.0"; None if the exporter's own forward is the only reference.
    `text`: the same comparison on a page of text.
    """

    positions: int
    argmax_matches: int
    max_logit_error: float
    max_confidence_error: float
    reference_library: str | None = None
    text: TextDrift | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One executable form of the model.

    name: unique in the bundle
    backend: the library that runs it
    file: the ONNX graph or the engine
    weights: the file of the graph's weights, if they are apart
    precision: the form of the stored weights
    kv_dtype: the type of the KV entries; int8 entries have their scales in them
    kv_layout: "in-place" if the graph writes into KV buffers of fixed size, "cuda" if these also have entries
        before heads, "appended" if it returns entries
    outputs: the names of its outputs
    batch, slots, capacity: the fixed sizes of the graph; None if they are symbolic
    drift: its distance from the checkpoint
    quantization: how its weights are stored, if it has codes
    accuracy_level: the level at which `drift` was measured, for weight-only int4 and int8 on ONNX Runtime
    engine: set for the TensorRT backends only
    """

    name: str
    backend: Annotated[str, one_of(BACKENDS)]
    file: str
    weights: str | None
    precision: Annotated[str, one_of(PRECISIONS)]
    kv_dtype: Annotated[str, one_of(KV_DTYPES)]
    kv_layout: Annotated[str, one_of(KV_LAYOUTS)]
    outputs: Annotated[tuple[str, ...], entries(16)]
    batch: Count = None
    slots: Count = None
    capacity: Count = None
    drift: ParityReport | None = None
    quantization: QuantizationInfo | None = None
    accuracy_level: int | None = None
    engine: EngineInfo | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether it takes one number of rows and slots only."""
        return self.slots is not None

    @property
    def is_batch_invariant(self) -> bool:
        """Whether, on a CPU, predictions depend on the width of a step by the order of fp32 sums at most. If
        not, exact mode gives the one-token text except where two tokens are almost equally likely.
        """
        if self.precision == "int8" and self.quantization is not None:
            return self.kv_dtype == "float32" and self.quantization.group_size == 32
        return self.precision == "float32" or self.is_integer

    @property
    def is_integer(self) -> bool:
        """Whether activations are quantized too, so that products are of integers."""
        return self.precision in INTEGER

    @property
    def is_engine(self) -> bool:
        return self.backend != "onnx"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if not {"token_ids", "confidence"} <= set(self.outputs) <= set(OUTPUTS):
            yield "outputs", f"token_ids and confidence are needed; known outputs are {', '.join(OUTPUTS)}"
        elif ("topk_ids" in self.outputs) != ("topk_logprobs" in self.outputs):
            yield "outputs", "topk_ids and topk_logprobs must both be listed, or neither"
        is_plain = self.is_integer and (self.backend, self.kv_layout) == ("onnx", "in-place")
        if self.kv_dtype == "int8" and not is_plain:
            yield "kv_dtype", "int8 is for w8a8 and w4a8 graphs of ONNX Runtime in the in-place layout"
        if self.kv_layout == "cuda" and self.is_engine:
            yield "kv_layout", "cuda is for graphs of ONNX Runtime"


@dataclass(frozen=True, slots=True)
class Profile:
    """A calibrated tau for one task, valid for the graph and the weights that it was measured on.

    name: of the task
    tau: the confidence that a prediction needs
    metric: the confidence metric that tau bounds
    variant: the variant it was measured on
    variant_sha256: the hash of the variant's graph
    evidence: the measurements that the choice rests on
    weights_sha256: the hash of the weights; None if it is unknown
    precision: of the variant; None if it is unknown
    masks: the most mask slots of a step: "auto", "full" (as many as the block allows) or a number
    accuracy_level: of the variant
    """

    name: str
    tau: float
    metric: Annotated[str, one_of(METRICS)]
    variant: str
    variant_sha256: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    weights_sha256: str | None = None
    precision: str | None = None
    masks: Annotated[int | Literal["auto", "full"], MASKS] = "full"
    accuracy_level: int | None = None


@dataclass(frozen=True, slots=True)
class StoredGrammar:
    """An automaton of bytes that answers must follow, kept in the bundle for any variant and any tokenizer.

    `kind` is what it was compiled from.
    """

    name: Name
    file: Annotated[str, matching(GRAMMAR_FILE, "grammar-, 16 hexadecimal digits and .dfa")]
    kind: Annotated[str, one_of(GRAMMAR_KINDS)]
    states: Annotated[int, integer(1, high=2**17)]
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a runtime knows about a bundle before it opens a graph.

    producer: the program that wrote it, with its version
    source: the checkpoint
    revision: the checkpoint's revision on the hub
    model: dimensions
    block: the block size that the checkpoint was trained with
    tokens: special token ids
    text: how text becomes token ids; None for a bundle of token ids only
    variants: executable forms of the model
    files: every file of the bundle but the manifest and its checksum
    profiles: calibrated taus
    grammars: automata for structured answers
    masks: the most masks of a step; None for the block's
    format_version: of docs/format.md
    """

    producer: str
    source: str
    revision: str | None
    model: ModelInfo
    block: Annotated[int, integer(1, high=4096)]
    tokens: TokenInfo
    text: TextInfo | None
    variants: Annotated[tuple[Variant, ...], entries(64)]
    files: Annotated[tuple[FileEntry, ...], entries(1000)]
    profiles: Annotated[tuple[Profile, ...], entries(10_000)] = ()
    grammars: Annotated[tuple[StoredGrammar, ...], entries(256)] = ()
    masks: Annotated[int | None, integer(0, high=4096)] = None
    format_version: str = FORMAT_VERSION

    def to_json(self) -> str:
        """The manifest as canonical JSON text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @property
    def mask_id(self) -> int:
        """The input of a slot without a token: the mask, or any id without masks."""
        return self.tokens.pad if self.tokens.mask is None else self.tokens.mask

    @property
    def graphs(self) -> set[str]:
        """The files that are ONNX graphs."""
        of_engines = {v.engine.graph for v in self.variants if v.engine is not None}
        return of_engines | {v.file for v in self.variants if not v.is_engine}


def parse_manifest(text: str, where: str = MANIFEST_FILE) -> Manifest:
    """Parse and validate the text of a manifest. Raises a BundleError that lists every wrong field."""
    try:
        value = parse(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where}: not valid JSON ({error}); copy or export the bundle again") from error
    _check_version(value.get("format_version") if isinstance(value, dict) else None, where)
    reader = FieldParser()
    manifest: Manifest = reader.read(Manifest, value, where)
    problems = reader.problems or list(_contradictions(manifest, where))
    if problems:
        raise BundleError(f"{len(problems)} problems in the manifest:{listed(problems)}")
    return manifest


def _check_version(version: Any, where: str) -> None:
    """Raise BundleError for another major version."""
    match = VERSION.match(version) if isinstance(version, str) else None
    supported = int(FORMAT_VERSION.split(".")[0])
    if match is None:
        raise BundleError(f"{where}: no `format_version`; this is not a mars-export bundle")
    major = int(match[1])
    if major != supported:
        what = f"{where}: bundle format {version[:20]}, this runtime reads {supported}.x"
        again = "export the bundle again with this mars-export"
        raise BundleError(f"{what}: {'update mars-export' if major > supported else again}")


def _contradictions(manifest: Manifest, where: str) -> Iterator[str]:
    """The problems that no single field has."""
    files = [entry.path for entry in manifest.files]
    variants = [v.name for v in manifest.variants]
    grammars = [grammar.name for grammar in manifest.grammars]
    for kind, names in (("files", files), ("variants", variants), ("grammars", grammars)):
        counts = Counter(names)
        yield from (f"{where}.{kind}: `{name[:80]}` is listed twice" for name in counts if counts[name] > 1)
    used = {v.file: f"variant {v.name}" for v in manifest.variants}
    used |= {v.weights: f"variant {v.name}" for v in manifest.variants if v.weights}
    used |= {v.engine.graph: f"variant {v.name}" for v in manifest.variants if v.engine is not None}
    used |= {g.file: f"grammar {g.name}" for g in manifest.grammars}
    if manifest.text is not None:
        used[manifest.text.tokenizer] = "text"
    for path in used.keys() - set(files):
        yield f"{where}: {used[path]} uses `{path[:80]}`, which `files` does not list"
    for profile in manifest.profiles:
        if profile.variant not in variants:
            yield f"{where}: profile `{profile.name}` is for variant `{profile.variant}`, which is missing"
    model, tokens = manifest.model, manifest.tokens
    if model.num_heads % model.num_kv_heads:
        yield f"{where}.model: {model.num_heads} heads cannot share {model.num_kv_heads} key/value heads"
    if not model.kv_layers:
        yield f"{where}.model.recurrent: every layer is recurrent: some must have KV entries"
    if not manifest.variants:
        yield f"{where}.variants: empty: nothing to run"
    masks = () if tokens.mask is None else (tokens.mask,)
    for name, ids in (("mask", masks), ("eos", tokens.eos), ("pad", (tokens.pad,))):
        if any(i >= model.vocab_size for i in ids):
            yield f"{where}.tokens.{name}: integers of 0 to {model.vocab_size - 1} are expected"
    if tokens.mask in tokens.eos:
        yield f"{where}.tokens: the mask token cannot end a sequence"
    if not masks and manifest.masks != 0:
        yield f"{where}.tokens.mask: null is valid only with masks 0"
