"""An opened bundle on a device: prompts in, completions or streams out. Picks the variant that fits, or says
why none does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .. import machine
from ..bundle import profiles
from ..bundle.manifest import Variant
from ..bundle.open import Bundle, open_bundle
from ..decode.backend import Backend
from ..decode.batch import KvBudget
from ..decode.blocks import BlockSchedule, check_blocks
from ..decode.config import GenerationConfig
from ..decode.pace.cost import Cost, measure
from ..decode.pace.estimates import Hopes
from ..decode.pace.policy import Policy
from ..decode.prefix import Prefixes, PrefixStats
from ..decode.row import Row
from ..decode.schedule import Limits, Schedule, run
from ..decode.stats import Stats
from ..device.name import DeviceName, OnGpu
from ..device.trt.cuda import memory_free
from ..errors import SessionError
from ..structured.guide import Guide
from ..structured.guide_factory import GuideFactory
from ..structured.guided_row import GuidedRow
from ..text.prompts import Prompt, Prompts, system_of
from ..text.tokenizer import Text, TextStream
from ..text.toolcalls import ToolStream, dialect_of
from .answer import Completion, Stream
from .conversation import Conversation
from .costs import CostFile
from .opening import load

CACHE_SHARE, MOST_CACHE = (
    16,
    1 << 30,
)  # of the free memory one part for saved prefixes, and at most so many bytes
CACHE_UNKNOWN = 256 << 20  # where nobody says how much memory is free, as on a GPU
COMMITS = ("cursor", "block")


@dataclass(frozen=True, slots=True)
class Commit:
    """Which cache loop decodes: "cursor" (default), or "block" with blocks of `cache_block` tokens (the
    paper's loop).
    """

    kind: str = "cursor"
    cache_block: int = 32

    def __post_init__(self) -> None:
        if self.kind not in COMMITS:
            raise SessionError(f"commit must be one of {', '.join(COMMITS)}, not {self.kind!r}")
        if self.cache_block < 1:
            raise SessionError(f"cache_block must be 1 or more, not {self.cache_block}")


CURSOR = Commit()


class Session:
    """A bundle opened on a device. May be used from several threads: each call owns its rows and their KV
    memory.
    """

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        backend: Backend,
        cost_file: CostFile | None = None,
        cache_bytes: int = 0,
        device: str = "cpu",
        *,
        safe: bool = False,
        parse_special: bool = False,
    ) -> None:
        self.bundle, self.variant, self.backend, self.device = bundle, variant, backend, device
        self._prefixes = Prefixes(cache_bytes, backend.firm_slots if cache_bytes else None)
        self._cost: Cost | None = None
        self._hopes = Hopes()
        self._cost_file, self._measuring = cost_file, threading.Lock()
        has_text = bundle.manifest.text is not None
        self.text = Text.of(bundle, safe=safe, parse_special=parse_special) if has_text else None
        self._prompts = Prompts(bundle, self.text, backend.max_capacity)
        self._guides = GuideFactory(bundle, self.text, backend.outputs)

    @classmethod
    def open(
        cls,
        path: str | Path,
        device: str = "cpu",
        *,
        threads: int | None = None,
        variant: str | None = None,
        accuracy_level: int | None = None,
        verify: bool = False,
        cache_bytes: int | None = None,
        safe: bool = False,
        parse_special: bool = False,
        options: Mapping[str, str] | None = None,
        stream: int | None = None,
        priority: int = 0,
        strict: bool = False,
    ) -> Session:
        """Open the bundle at `path` on `device` ("cpu", "cuda", or "cuda:1" for another GPU of those that
        CUDA_VISIBLE_DEVICES shows).

        threads: compute threads; None for the backend's choice.
        variant: None takes what fits: on cuda a TensorRT engine if the bundle has one, else the ONNX graph.
        accuracy_level: for int4 and int8 weights on ONNX Runtime: 0 is exact and slow, 4 rounds activations
            to 8-bit blocks and is fast; None is the level the export measured.
        verify: hash all files even if they were found good before.
        cache_bytes: memory for KV entries of texts that were read before (docs/conversations.md); None for a
            small share of what is free, 0 to keep none.
        safe: for a bundle that may be anybody's (docs/security.md): all is hashed and nothing remembered, no
            chat template runs (its table of turns is used), engines are refused, and sizes are limited.
        parse_special: the text of a special token in a message is that token; by default it is plain text.
        options: ONNX Runtime's own: names with a dot are a session's ("0" for
            "session.intra_op.allow_spinning"), the others the device's ("gpu_mem_limit").
        stream: a cudaStream_t of yours, as an integer, on which a GPU computes; it must outlive the session.
        priority: of the stream that a session on a GPU makes without one; lower numbers go first.
        strict: refuse a GPU that leaves operators on hidden states to the CPU, instead of a warning.

        Raises BundleError for a bad bundle, SessionError when no variant runs here; never falls back to
        another device.
        """
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise SessionError(f"threads must be None or an integer of 1 or more, not {threads!r}")
        if cache_bytes is not None and cache_bytes < 0:
            raise SessionError(f"cache_bytes must be 0 or more, not {cache_bytes}")
        bundle = open_bundle(path, full=verify, safe=safe)
        on_gpu = OnGpu(stream, priority, strict)
        running, backend = load(
            bundle, device, threads, variant, accuracy_level, safe=safe, options=options, on_gpu=on_gpu
        )
        name = DeviceName.of(device)
        cost_file = CostFile.of(bundle, running, str(name), threads, options)
        budget = _share(name) if cache_bytes is None else cache_bytes
        named = {"safe": safe, "parse_special": parse_special}
        return cls(bundle, running, backend, cost_file, budget, str(name), **named)

    def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, commit: Commit = CURSOR
    ) -> Completion:
        """Answer one prompt: a text as it stands, chat messages, or token ids."""
        return self.generate_batch([prompt], config, commit=commit)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        commit: Commit = CURSOR,
    ) -> list[Completion]:
        """Answer several prompts as rows of one batch, each with its own config if a sequence is given."""
        return list(self._answers(self._new_rows(prompts, config), max(1, len(prompts)), commit))

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        batch: int = 8,
    ) -> Iterator[Completion]:
        """Answer any number of prompts, at most `batch` at a time, and yield the answers in the order of the
        prompts.

        A row that ends makes room for the next at once; nobody waits for the slowest. What fails for one row
        is raised.
        """
        return self._answers(self._new_rows(prompts, config), batch, CURSOR)

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, commit: Commit = CURSOR
    ) -> Stream:
        """Answer one prompt step by step."""
        [(row, text)] = self._new_rows([prompt], config)
        return Stream(row, text, run(self._schedule([row], 1, commit), [row]))

    def encode(self, prompt: Prompt, most: int | None = None, tools: str | None = None) -> list[int]:
        """Token ids of a prompt, at most `most` and what the context holds; messages may come with tools, as
        a config has them.

        Raises SessionError for an empty or too long one (the very long ones before any work), for ids outside
        the vocabulary, and for what is no prompt.
        """
        return self._prompts.encode(prompt, most, tools)

    def new_row(
        self,
        index: int,
        prompt: Prompt,
        config: GenerationConfig,
        most: int | None = None,
        system: str | None = None,
    ) -> tuple[Row, TextStream | None]:
        """A row for a prompt of at most `most` tokens, and its growing text if the bundle has a tokenizer.

        `system` is the system message where `prompt` does not tell, because it is token ids. Raises
        SessionError as `encode` and `check` do.
        """
        self.check(config)
        stats = Stats()  # its clock runs while the prompt is tokenized
        text = TextStream(self.text, config.stop) if self.text is not None else None
        stop, eos_ids = text.push if text else None, self.bundle.manifest.tokens.eos
        ids = self.encode(prompt, most, config.tools)  # type: ignore[arg-type]  # it is text by now
        marks = self._prompts.marks(ids, system_of(prompt) or system) if self._prefixes.budget else ()
        stem = self._prefixes.stem(config.cache_salt, marks)
        if config.is_structured:
            guide = self.guide(config)
            row: Row = GuidedRow(index, ids, config, eos_ids, guide, stop, stats, self._hopes, stem=stem)
        else:
            row = Row(index, ids, config, eos_ids, stop, stats, self._hopes, stem=stem)
        return row, text

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the store of KV entries was asked, what it had, and what it holds."""
        return self._prefixes.stats

    def forget_prefixes(self) -> None:
        """Give the memory of the store of KV entries back."""
        self._prefixes.clear()

    def conversation(self, system: str | None = None, *, drop_oldest: bool = False) -> Conversation[Stream]:
        """Talk in turns. `drop_oldest`: at the context's end the turns behind the system message go."""
        if self.text is None:
            raise SessionError(
                f"{self.bundle.path}: a conversation needs a tokenizer, this bundle has none; use token ids"
            )

        def ask(ids: list[int], config: GenerationConfig) -> Stream:
            self.prepare([config])
            row, text = self.new_row(0, ids, config, system=system)
            return Stream(row, text, run(self._schedule([row], 1, CURSOR), [row]))

        return Conversation(self.text, ask, self.backend.max_capacity, system, drop_oldest=drop_oldest)

    def tool_stream(self) -> ToolStream:
        """A reader of the calls in a growing answer, in the way that this checkpoint writes them."""
        text = self.bundle.manifest.text
        return ToolStream(dialect_of(text.chat_template if text is not None else None))

    def guide(self, config: GenerationConfig) -> Guide:
        """What `config`, which is a structured one, asks of the form of an answer.

        Raises SessionError where this bundle cannot give it.
        """
        return self._guides.of(config)

    def profile(self, name: str) -> GenerationConfig:
        """The settings that a calibrated profile of the bundle names: tau, its metric and the window, full
        unless it says otherwise.

        Raises SessionError for an unknown profile, and for a stale one: made for another graph, other weights
        or another precision.
        """
        found = profiles.find(self.bundle, self.variant, name)
        config = GenerationConfig(tau=found.tau, metric=found.metric, window=found.window)
        self.check(config)
        return config

    @property
    def cost(self) -> Cost:
        """What a step costs here: as an earlier session of this user wrote down, else measured now, which
        takes about a second.

        Written down then, unless the machine is busy.
        """
        with self._measuring:
            if self._cost is None:
                self._cost = self._cost_file.read() if self._cost_file is not None else None
            if self._cost is None:
                manifest = self.bundle.manifest
                self._cost = measure(self.backend, manifest.block, manifest.tokens.mask)
                if self._cost_file is not None and not machine.is_busy():
                    self._cost_file.write(self._cost)
            return self._cost

    @cost.setter
    def cost(self, value: Cost) -> None:
        """Take this for what a step costs, and measure nothing: the same windows in every run."""
        self._cost = value

    def kv_budget(self, max_rows: int, num_bytes: int | None) -> KvBudget:
        """Of `num_bytes` of KV memory for at most `max_rows` rows; None for as much as comes."""
        variant = self.variant
        entry = self.bundle.manifest.model.entry_bytes(variant.kv_dtype)
        return KvBudget(max_rows, num_bytes, entry, self.backend.max_capacity, variant.is_engine)

    def policy(self) -> Policy:
        """A chooser of windows for one batch."""
        # A captured engine step is bound to its sizes, so it is better to have few of them.
        return Policy(lambda: self.cost, few_sizes=self.variant.is_engine)

    def prepare(self, configs: Iterable[GenerationConfig]) -> None:
        """See to it that costs are known if one of `configs` needs them: no request waits for it."""
        if any(config.window == "auto" and not config.one_token for config in configs):
            _ = self.cost

    def check(self, config: GenerationConfig) -> None:
        """Raise SessionError when this variant's graph lacks what `config` needs."""
        if not isinstance(config, GenerationConfig):
            raise SessionError(f"a config is a GenerationConfig, not {type(config).__name__}")

        def lacks(what: str, field: str | None) -> NoReturn:
            raise SessionError(what, code="unsupported_by_model", field=field)

        outputs = self.backend.outputs
        if config.metric != "probability" and config.metric not in outputs:
            lacks(f"the metric {config.metric} needs a bundle exported with --metrics", "metric")
        if config.needs_logits and "logits" not in outputs:
            field = "repetition_penalty" if config.is_greedy else "temperature"
            lacks("temperature and repetition_penalty need a bundle exported with --logits", field)
        if config.is_structured and self.text is None:
            lacks("schema, regex, choice, tools and grammar need a bundle with a tokenizer", config.structure)
        if config.stop and self.text is None:
            lacks("stop strings need a bundle with a tokenizer", "stop")

    def _new_rows(
        self, prompts: Sequence[Prompt], config: GenerationConfig | Sequence[GenerationConfig] | None
    ) -> list[tuple[Row, TextStream | None]]:
        configs = (
            list(config) if isinstance(config, Sequence) else [config or GenerationConfig()] * len(prompts)
        )
        if len(configs) != len(prompts):
            raise SessionError(f"{len(prompts)} prompts but {len(configs)} configs")
        rows = [
            self.new_row(i, prompt, c) for i, (prompt, c) in enumerate(zip(prompts, configs, strict=True))
        ]
        self.prepare(configs)  # takes a second once: after all was checked
        return rows

    def _schedule(self, rows: Sequence[Row], num_rows: int, commit: Commit) -> Schedule:
        """The loop for `rows`, at most `num_rows` at a time."""
        manifest, limits = self.bundle.manifest, Limits.of_rows(num_rows)
        if commit.kind == "block":
            check_blocks(self.backend, rows, commit.cache_block)
            return BlockSchedule(
                self.backend, manifest.block, manifest.tokens.mask, limits, commit.cache_block
            )
        return Schedule(self.backend, manifest.block, manifest.tokens.mask, limits, self.policy())

    def _answers(
        self, streams: Sequence[tuple[Row, TextStream | None]], num_rows: int, commit: Commit
    ) -> Iterator[Completion]:
        """Completions in the order of `streams`; what fails for one row is raised."""
        confidences: list[list[float]] = [[] for _ in streams]
        rows = [row for row, _ in streams]
        forwards = run(self._schedule(rows, num_rows, commit), rows)
        for (row, text), own in zip(streams, confidences, strict=True):
            while row.finish_reason is None:
                for event in next(forwards):
                    if event.error is not None:
                        raise event.error
                    confidences[event.row] += event.confidences
            yield Completion.of(row, text, own)
        for _ in forwards:
            pass  # the last rows leave, and what they have read and said is saved


def _share(device: DeviceName) -> int:
    """Bytes for saved prefixes where nobody says how many: a small part of what is free now."""
    free = machine.available() if device.kind == "cpu" else memory_free(device.ordinal)
    return CACHE_UNKNOWN if free is None else max(0, min(free // CACHE_SHARE, MOST_CACHE))
