"""Writes one tiny model in every precision to a folder, with the texts that the slow sampler gives it.

    python tests/machines/bundles.py FOLDER

Needs torch, which what reads them does not (check.py).
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from support import tiny
from support.exports import export
from support.oracle import Oracle, generate
from support.tiny import WIDE

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import ExportOptions

FORMS = {name: {"precision": name} for name in ("fp32", "w8a8", "w4a8", "int8", "int4", "fp16")}
FORMS["auto"] = {"precision": "w8a8", "kv": "int8"}  # what --precision auto chooses
BLOCK, NEW = 6, 12
LENGTHS = (1, 5, 17, 40, 140)  # a prompt of 140 goes through the attention of wide steps


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint = tiny.write(WIDE, folder / "checkpoint")
    options = ExportOptions(block=BLOCK, metrics=True, logits=True, allow_drift=True)
    for name, fields in FORMS.items():
        export(checkpoint, folder / name, replace(options, **fields))
    prompts = [[(37 * i + 11 * n) % 250 for i in range(length)] for n, length in enumerate(LENGTHS)]
    oracle = Oracle(tiny.load(WIDE, checkpoint), tiny.MASK, BLOCK)
    eos = open_checkpoint(str(checkpoint)).vocabulary.eos_token_ids
    texts = [generate(oracle, prompt, 1.0, max_new=NEW, eos=eos).tokens for prompt in prompts]
    (folder / "questions.json").write_text(json.dumps({"prompts": prompts, "texts": texts, "new": NEW}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
