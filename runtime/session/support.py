"""Checks that a bundle and its graph support a config."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from ..bundle.manifest import Manifest
from ..decode.config import GenerationConfig
from ..errors import SessionError


def check_support(config: GenerationConfig, manifest: Manifest, outputs: Collection[str]) -> None:
    """Raise SessionError if the bundle, or a graph with `outputs`, lacks something that `config` needs."""
    if not isinstance(config, GenerationConfig):
        raise SessionError(f"a config is a GenerationConfig, not {type(config).__name__}")

    def lacks(what: str, field: str | None) -> NoReturn:
        raise SessionError(what, code="unsupported_by_model", field=field)

    if manifest.tokens.mask is None and not (config.exact or config.one_token):
        lacks(
            "a tau needs masks, and this bundle was exported without masks: leave tau out to use exact mode"
            " (there, an MTP layer or prompt_lookup gives several tokens a step)",
            "tau",
        )
    if config.metric != "probability" and config.metric not in outputs:
        lacks(f"the metric {config.metric} needs a bundle exported with --metrics", "metric")
    if config.needs_logits and "logits" not in outputs:
        field = config.logits_field
        lacks(f"{field} needs a bundle with logits: export it without --no-logits", field)
    size = manifest.model.vocab_size
    if unknown := [token for token in dict(config.logit_bias) if token >= size]:
        lacks(f"logit_bias: token ids of this bundle are 0 to {size - 1}, not {unknown[0]}", "logit_bias")
    if config.is_structured and manifest.text is None:
        lacks("schema, regex, choice, tools and grammar need a bundle with a tokenizer", config.structure)
    if config.stop and manifest.text is None:
        lacks("stop strings need a bundle with a tokenizer", "stop")
