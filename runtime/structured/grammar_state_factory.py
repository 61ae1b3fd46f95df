"""Grammar states for the structured answers of one bundle."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import cached_property

from ..bundle.open import Bundle
from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.dialects import dialect_in
from ..text.tokenizer import Text
from .catalog import find, request_of
from .grammar import Grammars
from .grammar_state import GrammarState
from .matcher import leaves_a_choice
from .vocabulary import Vocabulary


class GrammarStateFactory:
    """Makes grammar states for a bundle whose graph returns `outputs`. Thread-safe."""

    def __init__(self, bundle: Bundle, text: Text | None, outputs: Collection[str]) -> None:
        self._bundle, self._text, self._outputs = bundle, text, outputs

    def prepare(self) -> None:
        """Build the vocabulary, if this bundle and installation have structured answers."""
        if {"logits", "topk_ids"} & set(self._outputs):
            with suppress(SessionError):
                self._grammars  # noqa: B018

    def of(self, config: GenerationConfig, thinking: bool | None = None) -> GrammarState:
        """A grammar state at the beginning of an answer. Calls of `tools` may come after `thinking`; True:
        the prompt has begun it. Raises SessionError if there can be none.
        """
        manifest, outputs = self._bundle.manifest, self._outputs
        try:
            stored = None if config.grammar is None else find(manifest, config.grammar, self._bundle.path)
            if stored is None:
                matcher = self._grammars.matcher(config, thinking)
            else:
                matcher = self._grammars.matcher(request_of(stored))
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

    @cached_property
    def _grammars(self) -> Grammars:
        manifest = self._bundle.manifest
        assert self._text is not None and manifest.text is not None, "checked before"
        vocabulary = Vocabulary(self._text.tokenizer, manifest.model.vocab_size, manifest.tokens.eos)
        return Grammars(vocabulary, dialect_in(manifest.text), manifest.text.thinking)
