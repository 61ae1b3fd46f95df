"""Options that onnx and trt share: which checkpoint, how its weights are stored, what the graph returns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# The words before 0.2 stay as second names: recipes of older bundles use them.
Group = Annotated[int, typer.Option("--group", help="Inputs that share a scale, for int4 and int8.")]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="int4 and int8 with zero points.")]
Search = Annotated[
    bool, typer.Option("--search", help="Try narrower ranges for each group of int4 and int8; slower.")
]
Quantizer = Annotated[
    str,
    typer.Option(
        help="What chooses the codes: gptq (with a calibration text), round, or auto: gptq for int4 where"
        " there is text."
    ),
]
CalibrationText = Annotated[
    Path | None,
    typer.Option(
        "--calibration-text",
        metavar="FILE",
        help="Rows of your task (.jsonl) or plain text (.txt) for gptq; the default checkpoint has its own.",
    ),
]
Head = Annotated[str, typer.Option(help="How a quantized bundle stores lm_head: float, int8 or int4.")]
Embedding = Annotated[str, typer.Option(help="How a quantized bundle stores the embedding: float or int8.")]
MaskToken = Annotated[
    str | None,
    typer.Option(help="The mask token (text or id); wins over the one that the tokenizer names, if any."),
]
Revision = Annotated[str | None, typer.Option(help="Hub revision to pin.")]
Base = Annotated[str | None, typer.Option(help="Base model of an adapter, instead of the one it names.")]
Tied = Annotated[
    bool | None,
    typer.Option(
        "--tied/--untied", help="Whether lm_head is the embedding, where config.json and weights disagree."
    ),
]
LongContext = Annotated[
    bool,
    typer.Option("--long-context", help="Longrope's frequencies for long texts, and the whole context."),
]
TokenizerDirectory = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="DIR", help="Tokenizer files to use instead of the checkpoint's."),
]
NoOracle = Annotated[
    bool, typer.Option("--no-oracle", help="Do not compare the checkpoint with transformers and peft.")
]
AllowDrift = Annotated[bool, typer.Option("--allow-drift", help="Keep a bundle that fails the self-check.")]
Metrics = Annotated[bool, typer.Option("--metrics", help="Also output margin and entropy.")]
Logits = Annotated[
    bool, typer.Option("--logits", help="Also output logits: needed for sampling and repetition penalty.")
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        min=0,
        metavar="K",
        help="Also output the K likeliest tokens (16 is plenty): what structured answers choose from where"
        " the likeliest is not allowed.",
    ),
]
