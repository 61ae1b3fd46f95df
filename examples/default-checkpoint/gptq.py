"""The default checkpoint's int4 codes by GPTQ, in two environments: llm-compressor pins its own transformers.

    python gptq.py prepare WORK                           # with mars-export[export]: merged, sequences.json
    python -m venv V && V/bin/pip install llmcompressor   # takes torch too; no GPU is needed
    V/bin/python gptq.py quantize WORK                    # WORK/int4, two to three minutes on 2 cores
    mars-export onnx WORK/int4 -o small.bundle --precision int4 --group 32 --asymmetric --allow-drift

The sequences are rows of the calibration splits: the prompt with its whole answer, and twice with a part of
the answer and seven masks behind it, because a MARS model predicts from masks. For a checkpoint of yours, put
its rows and its directory in their place.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ROWS = {
    ROOT / "calibration" / "data" / "assistant.calibration.jsonl": 40,
    ROOT / "calibration" / "data" / "arithmetic.calibration.jsonl": 40,
    ROOT / "examples" / "default-checkpoint" / "data" / "chat.calibration.jsonl": 20,
}
MASKS = 7  # of a full window at block 8
GROUP = 32  # the export's --group
BATCH = 20
SEQUENCES = 140


def prepare(work: Path) -> None:
    """Write the merged checkpoint in the stock format, and the calibration sequences."""
    try:
        import numpy as np
        from safetensors.numpy import save_file
        from tokenizers import Tokenizer

        from mars_export.exporter.checkpoint.default import base_directory
        from mars_export.exporter.checkpoint.open import open_checkpoint
        from mars_export.runtime.text import Text
    except ImportError as error:
        sys.exit(f"error: {error}; run this stage where mars-export[export] is installed")

    checkpoint = open_checkpoint(None)
    vocabulary, tensors = checkpoint.vocabulary, checkpoint.tensors
    merged = work / "merged"
    merged.mkdir(parents=True, exist_ok=True)
    (work / "sequences.json").unlink(missing_ok=True)  # written last: its presence says that all is there
    for file in base_directory().iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, merged)
    save_file(
        {name: np.array(tensors.read(name), np.float32) for name in tensors.shapes},
        merged / "model.safetensors",
        {"format": "pt"},
    )
    (merged / "tokenizer.json").write_text(vocabulary.tokenizer_json, encoding="utf-8")
    settings = json.loads((merged / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"mask_token": vocabulary.mask_token, "chat_template": vocabulary.chat_template}
    (merged / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    text = Text(Tokenizer.from_str(vocabulary.tokenizer_json), vocabulary.chat_template)
    draw, sequences = random.Random(0), []
    for path, count in ROWS.items():
        for row in draw.sample(
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], count
        ):
            prompt, answer = (
                text.encode(row["messages"]),
                [*text.encode(row["answer"]), vocabulary.eos_token_ids[0]],
            )
            sequences.append(prompt + answer)
            for _ in range(2):
                cut = draw.randrange(max(1, len(answer) - 4))
                sequences.append(prompt + answer[:cut] + [vocabulary.mask_token_id] * MASKS)
    (work / "sequences.json").write_text(json.dumps(draw.sample(sequences, SEQUENCES)), encoding="utf-8")
    print(f"{merged}, and {SEQUENCES} sequences")


def quantize(work: Path, symmetric: bool) -> None:
    """Run GPTQ over the linear maps; the vocabulary table stays as it is and is rounded by the export."""
    prepared = work / "sequences.json"
    if not prepared.is_file():
        sys.exit(
            f"error: no {prepared}; run `python gptq.py prepare {work}` first, where mars-export is installed"
        )
    try:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        sys.exit(
            f"error: {error}; run this stage in an environment of its own:"
            " python -m venv V && V/bin/pip install llmcompressor"
        )

    sequences = sorted(json.loads(prepared.read_text(encoding="utf-8")), key=len)
    # Batches of one length, cut from the left: a padding token would be one more thing that the model never
    # sees.
    batches = [sequences[i : i + BATCH] for i in range(0, len(sequences), BATCH)]
    ids = [sequence[len(sequence) - len(batch[0]) :] for batch in batches for sequence in batch]
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(work / "merged", dtype="float32"),
        tokenizer=AutoTokenizer.from_pretrained(work / "merged"),
        dataset=Dataset.from_list([{"input_ids": each, "attention_mask": [1] * len(each)} for each in ids]),
        recipe=GPTQModifier(
            ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}
        ),
        num_calibration_samples=len(ids),
        batch_size=BATCH,
        shuffle_calibration_samples=False,
        output_dir=str(work / "int4"),
        save_compressed=True,
    )
    print(
        f"{work / 'int4'}; export it with --precision int4 --group {GROUP}"
        f"{'' if symmetric else ' --asymmetric'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("prepare", "quantize"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--symmetric", action="store_true", help="codes without zero points")
    args = parser.parse_args()
    if args.stage == "prepare":
        prepare(args.work)
    else:
        quantize(args.work, args.symmetric)


if __name__ == "__main__":
    main()
