"""Guides for the structured answers of one bundle."""

from __future__ import annotations

import threading
from collections.abc import Collection

from ..bundle.open import Bundle
from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.tokenizer import Text
from ..text.toolcalls import dialect_of
from .automaton_matcher import StoredGrammars
from .grammar import Grammars, leaves_a_choice
from .guide import Guide


class GuideFactory:
    """Makes guides for a bundle whose graph returns `outputs`. Thread-safe."""

    def __init__(self, bundle: Bundle, text: Text | None, outputs: Collection[str]) -> None:
        self._bundle, self._text, self._outputs = bundle, text, outputs
        self._grammars: Grammars | None = None
        self._stored: StoredGrammars | None = None
        self._lock = threading.Lock()

    def of(self, config: GenerationConfig) -> Guide:
        """A guide at the beginning of an answer. Raises SessionError if this bundle cannot give one."""
        manifest, info = self._bundle.manifest, self._bundle.manifest.text
        assert self._text is not None and info is not None, "checked before"
        with self._lock:
            if config.grammar is not None:
                self._stored = self._stored or StoredGrammars(self._bundle, self._text.tokenizer)
            elif self._grammars is None:
                self._grammars = Grammars(
                    self._text.tokenizer.to_str(),
                    manifest.model.vocab_size,
                    manifest.tokens.eos,
                    dialect_of(info.chat_template),
                )
        try:
            if config.grammar is not None:
                assert self._stored is not None
                matcher = self._stored.matcher(config.grammar)
            else:
                assert self._grammars is not None
                matcher = self._grammars.matcher(config)
        except SessionError as error:
            error.code, error.field = "invalid_grammar", config.structure
            raise
        outputs = self._outputs
        if "logits" not in outputs and "topk_ids" not in outputs and leaves_a_choice(matcher):
            raise SessionError(
                "schema, regex, choice, tools and grammar need a bundle with logits or with --top-k 16:"
                " when the most likely token is not allowed, another one must be chosen",
                code="unsupported_by_model",
                field=config.structure,
            )
        eos_ids = manifest.tokens.eos if config.eos_ids is None else config.eos_ids
        return Guide(matcher, eos_ids, "logits" in outputs, manifest.block - 1)
