"""The model class for lm-evaluation-harness, which imports it by its entry point lm_eval.models.

Harnesses with entry points support `lm_eval --model mars_export`. For 0.4.13 and earlier, `python -m
mars_export.calibration.lm_eval` takes the same arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..runtime.errors import CalibrationError, MarsError
from .harness import NO_LIKELIHOOD, Answers

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    if __name__ == "__main__":
        sys.exit(f"error: this needs lm-evaluation-harness ({error}); pip install 'mars-export[lm-eval]'")
    raise

KNOWN = ("bundle", "tau", "metric", "profile", "max_gen_toks", "run_on", "threads")


@register_model("mars_export")
class MarsLM(LM):  # type: ignore[misc]
    """A bundle at one setting: --model_args bundle=PATH (exact mode), with tau=0.95 or profile=NAME; also
    metric, threads, max_gen_toks, run_on.

    `run_on` is cpu or cuda. The harness always passes a `device`, by default a GPU, so it is ignored.
    """

    def __init__(
        self,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,  # noqa: ARG002
        **arguments: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(set(arguments) - set(KNOWN)):
            raise CalibrationError(f"unknown model_args: {', '.join(unknown)} (known: {', '.join(KNOWN)})")
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
            raise CalibrationError(
                f"batch_size must be a positive number, not {batch_size}; automatic sizes are not supported"
            )
        self.answers = Answers.open(**arguments, batch=int(batch_size))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        return self.answers.answer([request.args for request in requests])

    def loglikelihood(self, requests: Sequence[Any]) -> Any:  # noqa: ARG002
        raise CalibrationError(NO_LIKELIHOOD)

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.answers.render(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        return self.answers.tokenizer_name


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except MarsError as error:
        sys.exit(f"error: {error}")
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        sys.exit(f"error: {error}; --include_path adds a folder of your own")
