"""Answers the requests of lm-evaluation-harness with a session. Only lm_eval.py imports the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.decode.config import GenerationConfig
from ..runtime.errors import CalibrationError
from ..runtime.session.session import Session

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # the harness's names for one setting
KNOWN = {"until", "do_sample", "temperature", "top_p", "top_k", "seed", *LIMITS}
NO_LIKELIHOOD = (
    "this task needs log-likelihoods of a text (multiple choice, perplexity). tau has no effect there,"
    " because nothing is generated: evaluate the checkpoint itself with --model hf. mars_export supports only"
    " generate_until tasks"
)


@dataclass(slots=True)
class Answers:
    """A session and an evaluation's settings. `templated`: prompts have the template's special tokens."""

    session: Session
    config: GenerationConfig
    batch: int = 1
    templated: bool = False

    @classmethod
    def open(
        cls,
        bundle: str = "",
        tau: float | None = None,
        metric: str | None = None,
        profile: str | None = None,
        max_gen_toks: int = 256,
        run_on: str = "cpu",
        threads: int | None = None,
        batch: int = 1,
    ) -> Answers:
        """Open the bundle, in exact mode unless tau or a profile is given. Raises MarsError."""
        if not bundle:
            raise CalibrationError("bundle=PATH is missing")
        settings: dict[str, Any] = {"tau": tau, "metric": metric, "max_new_tokens": max_gen_toks}
        settings = {name: value for name, value in settings.items() if value is not None}
        session = Session.open(str(bundle), run_on, threads=threads, cache_bytes=0)
        if session.text is None:
            raise CalibrationError(f"{bundle}: this bundle has no tokenizer, but the harness sends text")
        config = session.config(None if profile is None else str(profile), **settings)
        session.check(config)
        return cls(session, config, batch)

    def answer(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Texts for (context, generation settings). A context that does not fit is an error."""
        configs = [self.settings(kwargs) for _, kwargs in requests]
        prompts = [self.encode(context) for context, _ in requests]
        return [
            completion.text for completion in self.session.generate_each(prompts, configs, batch=self.batch)
        ]

    def encode(self, context: str) -> list[int]:
        assert self.session.text is not None
        return list(self.session.text.tokenizer.encode(context, add_special_tokens=not self.templated).ids)

    def settings(self, kwargs: Mapping[str, Any]) -> GenerationConfig:
        """The harness's generation settings as a config. Raises CalibrationError for an unknown one."""
        if unknown := sorted(set(kwargs) - KNOWN):
            raise CalibrationError(
                f"generation settings that mars_export does not know: {', '.join(unknown)}"
                f" (known: {', '.join(sorted(KNOWN))})"
            )
        until = kwargs.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(s for s in until if s)
        changes: dict[str, Any] = {"stop": stop}
        for name in LIMITS:
            if name in kwargs:
                changes["max_new_tokens"] = kwargs[name]
        if kwargs.get("do_sample", kwargs.get("temperature", 0) > 0):
            changes["temperature"] = kwargs.get("temperature", 1.0)
            changes |= {name: kwargs[name] for name in ("top_p", "top_k", "seed") if name in kwargs}
        return self.config.with_values(**changes)

    def render(self, history: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The chat template's text. From now on, contexts are expected to contain its special tokens."""
        if not add_generation_prompt:
            raise CalibrationError(
                "a prefilled answer (gen_prefix) in a chat template is not supported; run without"
                " --apply_chat_template"
            )
        assert self.session.text is not None
        self.templated = True
        return self.session.text.render(history)

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's request caches, different for different bundles."""
        return (
            f"mars_export-{self.session.bundle.manifest.files[0].sha256[:16]}-{self.session.bundle.path.name}"
        )
