"""Guides for the structured answers of one bundle."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property, lru_cache

from ..bundle.open import Bundle
from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.tokenizer import Text
from ..text.toolcalls import dialect_of
from .automaton_file import read_automaton
from .automaton_matcher import AutomatonState, Transitions
from .catalog import find
from .grammar import Grammars
from .grammar_state import GrammarState
from .matcher import TokenMatcher, leaves_a_choice
from .vocabulary import Vocabulary

MAX_OPEN = 16  # automata in memory


class GrammarStateFactory:
    """Makes grammar states for a bundle whose graph returns `outputs`. Thread-safe."""

    def __init__(self, bundle: Bundle, text: Text | None, outputs: Collection[str]) -> None:
        self._bundle, self._text, self._outputs = bundle, text, outputs
        self._transitions = lru_cache(MAX_OPEN)(self._read)

    def of(self, config: GenerationConfig) -> GrammarState:
        """A grammar state at the beginning of an answer. Raises SessionError if this bundle cannot give one,
        and BundleError for a bad file of a stored grammar.
        """
        manifest, outputs = self._bundle.manifest, self._outputs
        try:
            matcher = self._matcher(config)
        except SessionError as error:
            error.code, error.field = "invalid_grammar", config.structure
            raise
        if "logits" not in outputs and "topk_ids" not in outputs and leaves_a_choice(matcher):
            raise SessionError(
                "schema, regex, choice, tools and grammar need a bundle with logits or with --top-k 16:"
                " when the most likely token is not allowed, another one must be chosen",
                code="unsupported_by_model",
                field=config.structure,
            )
        eos_ids = manifest.tokens.eos if config.eos_ids is None else config.eos_ids
        return GrammarState(matcher, eos_ids, "logits" in outputs, manifest.block - 1)

    def _matcher(self, config: GenerationConfig) -> TokenMatcher:
        if config.grammar is None:
            return self._grammars.matcher(config)
        file = find(self._bundle.manifest, config.grammar, self._bundle.path).file
        return TokenMatcher(AutomatonState(self._transitions(file)), self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        assert self._text is not None, "checked before"
        manifest = self._bundle.manifest
        return Vocabulary(self._text.tokenizer, manifest.model.vocab_size, manifest.tokens.eos)

    @cached_property
    def _grammars(self) -> Grammars:
        info = self._bundle.manifest.text
        assert info is not None, "checked before"
        return Grammars(self._vocabulary, dialect_of(info.chat_template))

    def _read(self, file: str) -> Transitions:
        return Transitions(read_automaton(self._bundle, file), self._vocabulary)
