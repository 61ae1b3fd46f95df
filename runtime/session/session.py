"""An opened bundle on a device: prompts in, completions or streams out."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import profiles
from ..bundle.manifest import Variant
from ..bundle.open import Bundle, open_bundle
from ..decode.backend import Backend
from ..decode.budget import KvBudget
from ..decode.config import GenerationConfig, repeatable
from ..decode.event import Event
from ..decode.limits import Limits
from ..decode.prefix import PrefixCache, PrefixStats
from ..decode.schedule import Schedule, run
from ..decode.sequence import Sequence
from ..decode.speculation.cost import Cost, LearnedCost, built_in
from ..decode.speculation.drafts import AcceptanceRates, DraftTokens
from ..decode.speculation.planner import StepPlanner
from ..decode.stats import Stats
from ..device.name import DeviceName, GpuOptions
from ..device.states import state_bytes
from ..device.variants import load, pick
from ..errors import MarsError, SessionError
from ..text.dialects import dialect_in
from ..text.prompts import Chat, Prompt, Prompts, chat_of
from ..text.stream import TextStream
from ..text.thinking import ThinkingStream
from ..text.toolcalls import ToolStream
from .answer import Completion, Stream
from .conversation import Conversation
from .prefix_dir import PREFIX_BYTES, PrefixDir, PrefixFormat, cache_share, fingerprint
from .support import check_support

if TYPE_CHECKING:
    from ..structured.grammar_state import GrammarState, GrammarStateFactory
    from ..text.tokenizer import Text

PROFILE_SETS = {"exact", "tau", "metric", "masks"}
MAX_MARK = 32  # tokens of a mark with white space around it


class Session:
    """A bundle opened on a device. Thread-safe: each call has its own sequences and KV memory."""

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        backend: Backend,
        text: Text | None,
        cache_bytes: int = 0,
        device: str = "cpu",
    ) -> None:
        self.bundle, self.variant, self.backend, self.text = bundle, variant, backend, text
        self.device = device
        slots = backend.reproducible_slots if cache_bytes else None
        is_recurrent = bundle.manifest.model.recurrent is not None
        self._prefixes = PrefixCache(cache_bytes, slots, is_recurrent=is_recurrent)
        self._acceptance_rates = AcceptanceRates()
        self._learned_cost = LearnedCost(built_in(variant.precision, DeviceName.parse(device).kind))
        self._prompts = Prompts(bundle, text, backend.max_capacity)

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
        prefix_dir: str | Path | None = None,
        prefix_bytes: int = PREFIX_BYTES,
        safe: bool = False,
        parse_special: bool = False,
        options: Mapping[str, str] | None = None,
        stream: int | None = None,
        priority: int = 0,
        strict: bool = False,
    ) -> Session:
        """Open the bundle at `path` on `device` ("cpu", "cuda", or "cuda:1" for another of the GPUs that
        CUDA_VISIBLE_DEVICES shows).

        threads: compute threads; None for the backend's choice.
        variant: by default the one that fits: on cuda a TensorRT engine if the bundle has one, else the
            graph.
        accuracy_level: for int4 and int8 weights on ONNX Runtime: 0 is exact and slow, 4 rounds activations
            to 8-bit blocks and is fast; None is the level the export measured.
        verify: hash all files, even if an earlier session has.
        cache_bytes: memory of the prefix cache (docs/conversations.md); None for a small share of the free
            memory, 0 for no cache.
        prefix_dir: directory for entries of the prefix cache, which later sessions load; at most
            `prefix_bytes` bytes. It has the prompts in clear. Several processes may share it. Not for a model
            with recurrent layers.
        safe: for a bundle from an untrusted source (docs/security.md): all files are hashed, no chat template
            runs (its table of turns is used), engines are refused, and sizes are limited.
        parse_special: a special token's text in a message becomes that token; by default it is plain text.
        options: ONNX Runtime's own: names with a dot are a session's ("0" for
            "session.intra_op.allow_spinning"), the others the device's ("gpu_mem_limit").
        stream: your cudaStream_t as an integer, on which the GPU computes; it must outlive the session.
        priority: of the session's own stream on a GPU; lower numbers go first.
        strict: raise, instead of a warning, if a GPU leaves operators on hidden states to the CPU.

        Raises BundleError for a bad bundle, SessionError if no variant runs here. It never falls back to
        another device.
        """
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise SessionError(f"threads must be None or 1 or more, not {threads!r}", field="threads")
        for field, value in (("cache_bytes", cache_bytes or 0), ("prefix_bytes", prefix_bytes)):
            if value < 0:
                raise SessionError(f"{field} must be 0 or more, not {value}", field=field)
        bundle = open_bundle(path, full=verify, safe=safe)
        gpu = GpuOptions(stream, priority, strict)
        choice = pick(bundle, device, variant, accuracy_level, safe=safe)
        name = DeviceName.parse(device)
        if bundle.manifest.model.recurrent is not None and prefix_dir is not None:
            raise SessionError(
                f"{bundle.path}: the prefix cache of a model with recurrent layers is in memory only: leave"
                " out prefix_dir"
            )
        budget = cache_share(name) if cache_bytes is None else cache_bytes
        # Creating ONNX Runtime's session does not hold Python's lock; reading a tokenizer does.
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(load, bundle, choice, device, threads, options, gpu)
            from ..text.tokenizer import Text

            text = Text.load(bundle, safe=safe, parse_special=parse_special)
            backend = opening.result()
        session = cls(bundle, choice, backend, text, budget, str(name))
        if prefix_dir is not None:
            bits = fingerprint(bundle, choice, str(name), options)
            form = PrefixFormat.of(bits, bundle.manifest.model, choice, backend)
            PrefixDir(prefix_dir, prefix_bytes, form, session._prefixes)
        return session

    def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, cache_block: int = 1
    ) -> Completion:
        """Answer one prompt: a text without the chat template, chat messages, token ids, or a `Chat`.

        cache_block: as in `Limits`.
        """
        return self.generate_batch([prompt], config, cache_block=cache_block)[0]

    def generate_batch(
        self,
        prompts: abc.Sequence[Prompt],
        config: GenerationConfig | abc.Sequence[GenerationConfig] | None = None,
        *,
        cache_block: int = 1,
    ) -> list[Completion]:
        """Answer several prompts as sequences of one batch; `config` may be a sequence with one for each."""
        return list(self._answers(self._new_sequences(prompts, config), max(1, len(prompts)), cache_block))

    def generate_each(
        self,
        prompts: abc.Sequence[Prompt],
        config: GenerationConfig | abc.Sequence[GenerationConfig] | None = None,
        *,
        batch: int = 8,
        drafts: abc.Sequence[abc.Sequence[int]] = (),
    ) -> Iterator[Completion]:
        """Answer any number of prompts, at most `batch` at a time, and yield the answers in order.

        A sequence that ends makes room for the next prompt at once. The error of one sequence is raised.
        `drafts`: token ids of probable answers, which exact mode verifies in the first step.
        """
        seqs = self._new_sequences(prompts, config)
        for seq, ids in zip(seqs, drafts, strict=False):
            tokens = self.encode(list(ids)) if ids else ()
            seq.draft_tokens = DraftTokens(tuple(tokens), (1.0,) * len(tokens), "prompt_lookup")
        return self._answers(seqs, batch)

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, cache_block: int = 1
    ) -> Stream:
        """Answer one prompt step by step."""
        [seq] = self._new_sequences([prompt], config)
        return Stream(seq, run(self.schedule(Limits.of_rows(1, cache_block)), [seq]))

    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt: at most `max_tokens`, and as many as the context holds.

        Raises SessionError for an empty, too long or invalid prompt, and for ids outside the vocabulary.
        """
        return self._prompts.encode(prompt, max_tokens)

    def new_sequence(
        self, index: int, prompt: Prompt, config: GenerationConfig, max_tokens: int | None = None
    ) -> Sequence:
        """A sequence for a prompt of at most `max_tokens` tokens. The bundle has what `config` needs. Raises
        SessionError as `encode` does.
        """
        stats = Stats()  # its clock runs while the prompt is tokenized
        chat, tools = chat_of(prompt), None if config.tools is None else str(config.tools)
        if chat is not None:
            prompt = chat = replace(chat, tools=tools or chat.tools)
            tools = chat.tools
        ids = self.encode(prompt, max_tokens)
        system = None if chat is None else chat.system_message
        marks = self._prompts.marks(ids, system, tools) if self._prefixes.budget else ()
        thinking = self.thinking_stream(ids) if chat is not None and config.may_think else None
        text = TextStream(self.text, config.stop, thinking) if self.text is not None else None
        new: abc.Callable[..., Sequence] = Sequence
        if config.is_structured:
            from ..structured.constrained_sequence import ConstrainedSequence

            state = self.grammar_state(config, None if thinking is None else thinking.is_open)
            new = partial(ConstrainedSequence, grammar_state=state)
        return new(
            index,
            ids,
            config,
            self.bundle.manifest.tokens.eos,
            text,
            stats,
            self._acceptance_rates,
            self._prefixes.handle(config.cache_salt, marks),
            mask_limit=self.bundle.manifest.masks,
            check=self.check,
        )

    @property
    def prefix_stats(self) -> PrefixStats:
        """Counts of the prefix cache."""
        return self._prefixes.stats

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._prefixes.clear()

    def conversation(self, system: str | None = None, *, drop_oldest: bool = False) -> Conversation:
        """A conversation. `drop_oldest`: if the context is full, the turns after the system message are
        dropped.
        """
        if self.text is None:
            raise SessionError(
                f"{self.bundle.path}: a conversation needs a tokenizer, this bundle has none; use token ids"
            )

        def ask(ids: list[int], config: GenerationConfig) -> Stream:
            return self.stream(Chat(ids, system=system), config)

        return Conversation(self.text, ask, self.backend.max_capacity, system, drop_oldest=drop_oldest)

    def tool_stream(self) -> ToolStream:
        """A reader of the calls in a growing answer, in the format of this checkpoint."""
        text = self.bundle.manifest.text
        return ToolStream(dialect_in(text), None if text is None else text.thinking)

    def thinking_stream(self, prompt: abc.Sequence[int]) -> ThinkingStream | None:
        """A splitter of the answer to a chat's `prompt`; None if the chat template marks no thinking."""
        info = self.bundle.manifest.text
        if info is None or info.thinking is None or self.text is None:
            return None
        tail = self.text.spelled(prompt[-MAX_MARK:]).rstrip()
        return ThinkingStream(info.thinking, is_open=tail.endswith(info.thinking.open))

    def grammar_state(self, config: GenerationConfig, thinking: bool | None = None) -> GrammarState:
        """The grammar state of a structured `config`; `thinking` is that of GrammarStateFactory. Raises
        SessionError if this bundle does not support it.
        """
        return self._grammar_states.of(config, thinking)

    @cached_property
    def _grammar_states(self) -> GrammarStateFactory:
        from ..structured.grammar_state import GrammarStateFactory

        return GrammarStateFactory(self.bundle, self.text, self.backend.outputs)

    def config(self, profile: str | None = None, **settings: Any) -> GenerationConfig:
        """The config of a request: `settings`, with those of a profile of the bundle, repeatable as a seed
        requires. Raises SessionError, also for settings that the profile sets, for a metric without
        tau and for prompt lookup with one.
        """
        if profile is not None and (given := PROFILE_SETS & settings.keys()):
            name = min(given)
            raise SessionError(
                f"a profile sets {', '.join(sorted(PROFILE_SETS))}; use either the profile or {name}",
                field=name,
            )
        if "metric" in settings and "tau" not in settings:
            raise SessionError(
                "metric is the confidence that tau is compared with; give tau too", field="metric"
            )
        has_tau = profile is not None or "tau" in settings or settings.get("exact") is False
        if settings.get("prompt_lookup") and has_tau:
            raise SessionError(
                "prompt_lookup works in exact mode only, not with a tau: give one of them",
                field="prompt_lookup",
            )
        config = GenerationConfig(**settings)
        if profile is not None:
            try:
                config = config.with_profile(self.profile(profile))
            except MarsError as error:
                error.field = "profile"
                raise
        return repeatable(config, has_masks="masks" in settings, has_seed="seed" in settings)

    def prepare(self) -> None:
        """Build the tables of the first grammar and of the first special token in a message now: for a large
        vocabulary this stops other threads for a second.
        """
        if self.text is not None:
            self.text.prepare()
            self._grammar_states.prepare()

    def profile(self, name: str) -> GenerationConfig:
        """The settings of a profile of the bundle: tau, metric and masks.

        Raises SessionError for an unknown profile, and for a stale one: made for another graph, other weights
        or another precision.
        """
        profile = profiles.find(self.bundle, self.variant, name)
        config = GenerationConfig(tau=profile.tau, metric=profile.metric, masks=profile.masks)
        self.check(config)
        return config

    @property
    def cost(self) -> Cost:
        """The cost of a step as the session's steps so far have shown it."""
        return self._learned_cost.cost

    @cost.setter
    def cost(self, value: Cost) -> None:
        """Use this table instead of a learned one, for the same numbers of masks in every run."""
        self._learned_cost.fix(value)

    def kv_budget(self, max_rows: int, num_bytes: int | None) -> KvBudget:
        """A budget of `num_bytes` of KV memory for at most `max_rows` sequences; None for no limit."""
        variant, net = self.variant, self.bundle.manifest.model.recurrent
        if num_bytes is not None and net is not None:
            num_bytes -= (states := max_rows * state_bytes(net))
            if num_bytes <= 0:
                raise SessionError(
                    f"kv_bytes: the recurrent layers' states of {max_rows} rows take {states / 1e6:.0f} MB:"
                    " give more, or fewer max_rows"
                )
        entry = self.bundle.manifest.model.entry_bytes(variant.kv_dtype)
        capacity, is_host = self.backend.max_capacity, DeviceName.parse(self.device).kind == "cpu"
        if num_bytes is not None and variant.is_engine:
            max_rows = max(1, min(max_rows, num_bytes // (capacity * entry)))
        return KvBudget(max_rows, num_bytes, entry, capacity, variant.is_engine, is_host)

    def schedule(self, limits: Limits, budget: KvBudget | None = None) -> Schedule:
        """A decoding loop of its own, for one thread."""
        manifest, planner = self.bundle.manifest, StepPlanner(self._learned_cost)
        if manifest.model.recurrent is not None and limits.cache_block > 1:
            raise SessionError(
                "a model with recurrent layers supports cursor commit only; leave out cache_block"
            )
        return Schedule(self.backend, manifest.block, manifest.mask_id, limits, planner, budget)

    def check(self, config: GenerationConfig) -> None:
        """Raise SessionError if this bundle, or this variant's graph, lacks something that `config` needs."""
        check_support(config, self.bundle.manifest, self.backend.outputs)

    def _new_sequences(
        self, prompts: abc.Sequence[Prompt], config: GenerationConfig | abc.Sequence[GenerationConfig] | None
    ) -> list[Sequence]:
        configs = (
            list(config)
            if isinstance(config, abc.Sequence)
            else [config or GenerationConfig()] * len(prompts)
        )
        if len(configs) != len(prompts):
            raise SessionError(f"{len(prompts)} prompts but {len(configs)} configs")
        for each in configs:
            self.check(each)
        pairs = enumerate(zip(prompts, configs, strict=True))
        return [self.new_sequence(i, prompt, each) for i, (prompt, each) in pairs]

    def _answers(
        self, seqs: abc.Sequence[Sequence], num_rows: int, cache_block: int = 1
    ) -> Iterator[Completion]:
        """Completions in the order of `seqs`. The error of one sequence is raised."""
        steps = run(self.schedule(Limits.of_rows(num_rows, cache_block)), seqs)
        events: list[list[Event]] = [[] for _ in seqs]
        for seq, mine in zip(seqs, events, strict=True):
            # By its last event: a sequence that fails has its finish_reason before.
            while (reason := mine[-1].finish_reason if mine else None) is None:
                for event in next(steps):
                    if event.error is not None:
                        raise event.error
                    events[event.seq].append(event)
            yield Completion.of(mine, seq.text, reason, seq.stats)
            mine.clear()
        for _ in steps:
            pass  # the last sequences leave the batch, and their entries are cached
