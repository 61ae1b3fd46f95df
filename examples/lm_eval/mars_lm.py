"""Runs generation tasks of lm-evaluation-harness on a bundle, with the harness's own arguments.

    pip install 'mars-export[cpu,lm-eval]'
    python mars_lm.py --model mars_export --model_args bundle=mars.bundle --tasks gsm8k  # exact mode
    python mars_lm.py --model mars_export --model_args bundle=mars.bundle,tau=0.95 --tasks gsm8k

Also in --model_args: profile, metric, threads, max_gen_toks and run_on (cpu or cuda; the harness always
passes a `device`, by default a GPU, so it is ignored).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mars_export import CalibrationError, GenerationConfig, MarsError, Session

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    sys.exit(f"error: this needs lm-evaluation-harness ({error}); pip install 'mars-export[lm-eval]'")

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # the harness's names for one setting
SAMPLING = ("top_p", "top_k", "seed")
KNOWN = {"until", "do_sample", "temperature", *SAMPLING, *LIMITS}


@register_model("mars_export")
class MarsLM(LM):
    """A bundle at one setting. Raises MarsError for settings and prompts that do not fit it."""

    def __init__(
        self,
        bundle: str = "",
        profile: str | None = None,
        max_gen_toks: int = 256,
        run_on: str = "cpu",
        threads: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,  # noqa: ARG002
        **settings: Any,  # tau, metric
    ) -> None:
        super().__init__()
        if not bundle:
            raise CalibrationError("bundle=PATH is missing")
        if unknown := sorted(settings.keys() - {"tau", "metric"}):
            raise CalibrationError(f"unknown model_args: {', '.join(unknown)}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
            raise CalibrationError(f"batch_size must be a positive number, not {batch_size}")
        self.session = Session.open(bundle, run_on, threads=threads, cache_bytes=0)
        if self.session.text is None:
            raise CalibrationError(f"{bundle}: this bundle has no tokenizer, but the harness sends text")
        self.text = self.session.text
        self.config = self.session.config(profile, max_new_tokens=max_gen_toks, **settings)
        self.session.check(self.config)
        self.batch = int(batch_size)
        self.is_templated = False  # prompts have the template's special tokens

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        contexts, settings = zip(*(request.args for request in requests), strict=True)
        configs = [self.with_settings(values) for values in settings]
        answers = self.session.generate_each(list(map(self.encode, contexts)), configs, batch=self.batch)
        return [answer.text for answer in answers]

    def encode(self, context: str) -> list[int]:
        return list(self.text.tokenizer.encode(context, add_special_tokens=not self.is_templated).ids)

    def with_settings(self, values: Mapping[str, Any]) -> GenerationConfig:
        """The harness's generation settings."""
        if unknown := sorted(values.keys() - KNOWN):
            raise CalibrationError(f"unknown generation settings: {', '.join(unknown)}")
        until = values.get("until") or ()
        changes: dict[str, Any] = {"stop": (until,) if isinstance(until, str) else tuple(filter(None, until))}
        if limit := next((values[name] for name in LIMITS if name in values), None):
            changes["max_new_tokens"] = limit
        if values.get("do_sample", values.get("temperature", 0) > 0):
            changes["temperature"] = values.get("temperature", 1.0)
            changes |= {name: values[name] for name in SAMPLING if name in values}
        return self.config.with_values(**changes)

    def loglikelihood(self, requests: Sequence[Any]) -> Any:  # noqa: ARG002
        raise CalibrationError(
            "this task scores a given text (multiple choice, perplexity). tau has no effect there, because"
            " nothing is generated: evaluate the checkpoint itself with --model hf"
        )

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise CalibrationError("gen_prefix is not supported; run without --apply_chat_template")
        self.is_templated = True
        return self.text.render(chat_history)

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's request caches, different for different bundles."""
        bundle = self.session.bundle
        return f"mars_export-{bundle.manifest.files[0].sha256[:16]}-{bundle.path.name}"


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except (MarsError, ValueError) as error:  # the harness's error for an unknown task is a ValueError
        sys.exit(f"error: {error}")
