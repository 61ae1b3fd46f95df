"""Run a bundle with onnxruntime, numpy and tokenizers alone: one sequence, greedy.

    python run.py mars.bundle "turn on the kitchen light" --system "Reply with tool calls."   # exact mode
    python run.py mars.bundle "turn on the kitchen light" --tau 0.95                          # lossy, faster

This file is the shortest complete decoder of the bundle format (docs/format.md). It gives the tokens of
mars-export, which adds batches, sampling, grammars, a prefix cache and GPUs.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer


class Model:
    """One sequence of a bundle's step graph. A step writes the KV entries of its slots in place."""

    def __init__(self, bundle: Path, capacity: int = 2048) -> None:
        manifest = json.loads((bundle / "manifest.json").read_text())
        if not manifest["format_version"].startswith("1."):
            raise SystemExit(f"{bundle}: format {manifest['format_version']}; this reader knows format 1")
        variants = [v for v in manifest["variants"] if v["backend"] == "onnx" and v["slots"] is None]
        if not variants or variants[0]["kv_layout"] != "in-place" or manifest["tokens"]["mask"] is None:
            raise SystemExit(f"{bundle}: this example needs a bundle of `mars-export onnx` with a mask token")
        self.block, self.mask = manifest["block"], manifest["tokens"]["mask"]
        self.eos, self.text = frozenset(manifest["tokens"]["eos"]), manifest["text"]
        self.tokenizer = Tokenizer.from_file(str(bundle / self.text["tokenizer"]))
        options = ort.SessionOptions()
        is_new = [int(part) for part in ort.__version__.split(".")[:2]] >= [1, 30]  # older ones abort
        if variants[0]["precision"] == "w8a8" and is_new:  # products that are exact without VNNI, too
            options.add_session_config_entry("session.x64quantprecision", "1")
        path = bundle / variants[0]["file"]
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        kinds = {"float32": (np.float32, 0), "float16": (np.float16, 0), "int8": (np.int8, 2)}
        dtype, scale_bytes = kinds[variants[0]["kv_dtype"]]
        shape = manifest["model"]["num_kv_heads"], capacity, manifest["model"]["head_dim"] + scale_bytes
        for i in range(manifest["model"]["num_layers"]):
            for kind in ("key", "value"):
                memory = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, *shape), dtype))
                self.binding.bind_ortvalue_input(f"past_key_values.{i}.{kind}", memory)
                self.binding.bind_ortvalue_output(f"present.{i}.{kind}", memory)
        self.capacity = capacity

    def prompt(self, request: str, system: str | None) -> list[int]:
        """Token ids [tokens] of a conversation, by the bundle's table of chat turns."""
        turns = [("system", system)] * (system is not None) + [("user", request)]
        text, previous = "", "start"
        for role, content in turns:
            text += self.text["chat"]["between"][previous][role] + content
            previous = role
        text += self.text["chat"]["after"][previous]
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def step(self, ids: list[int], cursor: int, num_outputs: int) -> tuple[list[int], list[float]]:
        """Feed `ids` after `cursor` final KV entries; the predictions of the last `num_outputs` slots."""
        if cursor + len(ids) > self.capacity:
            raise SystemExit(f"the KV memory is full: {self.capacity} entries")
        outputs = range(len(ids) - num_outputs, len(ids))
        for name, value in (("input_ids", [ids]), ("kv_length", [cursor]), ("output_index", [outputs])):
            self.binding.bind_cpu_input(name, np.array(value, np.int64))
        self.binding.bind_output("token_ids")
        self.binding.bind_output("confidence")
        self.session.run_with_iobinding(self.binding)
        token_ids, confidences = (value.numpy()[0].tolist() for value in self.binding.get_outputs()[-2:])
        return token_ids, confidences


def decode(model: Model, prompt: list[int], tau: float | None, max_new_tokens: int) -> Iterator[list[int]]:
    """Yield the tokens that each step accepts. tau None: exact mode, the tokens of one-token decoding."""
    tokens, cursor, drafts = list(prompt), 0, []
    end = len(prompt) + max_new_tokens
    while True:
        pending = tokens[cursor:]  # tokens without final KV entries
        masks = [] if tau is not None and tau >= 1 else [model.mask] * (model.block - 1)
        predicted, confidences = model.step(pending + drafts + masks, cursor, 1 + len(drafts) + len(masks))
        n = 1  # the first is ordinary next-token prediction: always accepted
        if tau is None:
            while n <= len(drafts) and drafts[n - 1] == predicted[n - 1]:
                n += 1
        else:
            while n < len(predicted) and confidences[n] >= tau:
                n += 1
        n = min(n, end - len(tokens))
        n = next((i + 1 for i in range(n) if predicted[i] in model.eos), n)
        # Entries of the pending tokens and of verified drafts are final; the next step overwrites the rest.
        cursor = len(tokens) + (n - 1 if tau is None else 0)
        tokens += predicted[:n]
        yield predicted[:n]
        if tokens[-1] in model.eos or len(tokens) >= end:
            return
        # After a wrong draft, the predictions that follow it are void.
        drafts = predicted[n:] if tau is None and n == len(drafts) + 1 else []


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("request")
    parser.add_argument("--system")
    parser.add_argument("--tau", type=float, help="accept guesses of this confidence without verification")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    model = Model(options.bundle)
    steps = list(
        decode(model, model.prompt(options.request, options.system), options.tau, options.max_new_tokens)
    )
    tokens = [token for step in steps for token in step]
    print(model.tokenizer.decode(tokens))
    print(f"{len(tokens)} tokens, {len(tokens) / len(steps):.2f} per forward")


if __name__ == "__main__":
    main()
