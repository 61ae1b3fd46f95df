"""examples/finetune: its two streams are plain forwards of a model of each family, and what it trains is a
checkpoint that exports."""

from __future__ import annotations

import copy
import importlib
import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import families, tiny
from support.exports import export
from support.paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint

EXAMPLE = ROOT / "examples" / "finetune"
NAMES = ("llama", "qwen3", "gemma3", "phi3", "smollm3")
BLOCK = 5
# The last has no spare row of the embedding for a mask token.
MODELS = families.ALL | {
    "filled": tiny.Tiny("filled", "llama", {"vocab_size": tiny.NUM_TOKENS - 1}, tied=True)
}


@pytest.fixture(scope="module")
def program() -> Iterator[SimpleNamespace]:
    names = ("rows", "model", "measure", "finetune")
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(EXAMPLE))
    for name in names:
        del sys.modules[name]


def stock(name: str, directory: Path) -> Path:
    return tiny.write(MODELS[name], directory)


def load(program: SimpleNamespace, directory: Path) -> Any:
    base = program.model.open_base(str(directory))
    return program.model.load(base, tiny.MASK, False, torch.float32).eval()


def packed(program: SimpleNamespace) -> list:
    """Two sequences with windows over their answers."""
    draw = random.Random(4)
    tokens = [[draw.randrange(tiny.NUM_BYTES) for _ in range(length)] for length in (37, 21)]
    first, second = program.rows.Sequence(tokens[0], 6), program.rows.Sequence(tokens[1], 4)
    grid = program.model.grid
    return [(first, grid(first, BLOCK - 1, 3)), (second, grid(second, BLOCK - 1, 0))]


@pytest.mark.parametrize("name", sorted(families.ALL))
def test_streams_are_plain_forwards(program: SimpleNamespace, name: str, tmp_path: Path) -> None:
    plain = load(program, stock(name, tmp_path)).double()  # so that only the rule can make a difference
    model, batch = copy.deepcopy(plain), packed(program)
    program.model.set_attention(model)
    with torch.inference_mode():
        pack, ours = program.model.forward(model, batch, tiny.MASK)
        row = 0
        for sequence, spans in batch:
            whole = plain(torch.tensor([sequence.tokens])).logits[0].float()
            for place in range(sequence.start, len(sequence.tokens)):
                assert pack.targets[row] == sequence.tokens[place] and not pack.noisy[row]
                torch.testing.assert_close(ours[row], whole[place - 1], atol=1e-5, rtol=1e-5)
                row += 1
            for start, stop in spans:
                prefix = [*sequence.tokens[:start], *[tiny.MASK] * (stop - start)]
                alone = plain(torch.tensor([prefix])).logits[0].float()
                for place in range(start, stop):
                    assert pack.targets[row] == sequence.tokens[place + 1] and pack.noisy[row]
                    torch.testing.assert_close(ours[row], alone[place], atol=1e-5, rtol=1e-5)
                    row += 1
        assert row == len(ours)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_mask_reach_what_it_sees(program: SimpleNamespace, name: str, tmp_path: Path) -> None:
    model, batch = load(program, stock(name, tmp_path)), packed(program)
    program.model.set_attention(model)
    (sequence, spans), _ = batch
    embedded: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, out: embedded.append(out))
    pack, logits = program.model.forward(model, batch, tiny.MASK)
    clean, (first, second) = len(sequence.tokens) - 1, spans[:2]
    at = clean + first[1] - first[0] + 2  # the third mask of the second window
    row = int((pack.outputs == at).nonzero())
    (gradient,) = torch.autograd.grad(logits[row].logsumexp(0), embedded[0])
    reached = gradient[0].abs().sum(-1) > 0
    seen = torch.zeros_like(reached)
    seen[: second[0]] = True
    seen[at - 2 : at + 1] = True
    assert not (reached & ~seen).any()
    if name not in ("gemma3", "phi3"):  # whose sliding windows hide the beginning
        assert torch.equal(reached, seen)


def test_windows_cover_an_answer_once(program: SimpleNamespace) -> None:
    for length in range(1, 20):
        sequence = program.rows.Sequence([0] * (3 + length), 3)
        for offset in range(BLOCK - 1):
            spans = program.model.grid(sequence, BLOCK - 1, offset)
            covered = [place for start, stop in spans for place in range(start, stop)]
            assert covered == [*range(3, 2 + length)]
            assert all(0 < stop - start < BLOCK for start, stop in spans)


LORA, FULL = "--epochs 50 --lr 4e-3 --rank 8 --checkpointing", "--epochs 60 --lr 6e-3 --full"
ROWS = "--epochs 36 --lr 5e-3 --rank 8"  # of recurrent layers, which torch computes slowly
FACTS = {"one": "the inn is on the hill", "two": "her hat is in the tin", "six": "an ant ran on the ice"}


def write_rows(path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{key} {word}"}], "answer": answer}
        for word in ("a", "b", "c", "d")
        for key, answer in FACTS.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small(name: str, directory: Path) -> Path:
    """A stock model as transformers initializes it: loud weights do not suit full training."""
    config_class, model_class = tiny.CLASSES[MODELS[name].family]
    torch.manual_seed(0)
    tiny.save(model_class(config_class(**tiny.config_values(MODELS[name]))), directory)
    return directory


@pytest.mark.parametrize("name", [*NAMES, "filled", "hybrid"])
def test_training_makes_a_checkpoint_that_guesses_ahead(
    program: SimpleNamespace, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = name in ("smollm3", "gemma3")
    how = FULL if whole else ROWS if name == "hybrid" else LORA
    base = tiny.without_mask((small if whole else stock)(name, tmp_path / "base"))
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "mars"
    words = f"--base {base} --rows {rows} --held-out {rows} --out {out} --block {BLOCK} --batch 6 --threads 1"
    program.finetune.main(f"{words} {how}".split())
    printed = capsys.readouterr().out
    assert "mask token <|mask|> (id 268): a new token" in printed
    assert open_checkpoint(str(out)).block == BLOCK
    export(out, tmp_path / "bundle", block=BLOCK)
    session = Session.open(tmp_path / "bundle", threads=1, cache_bytes=0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = forwards = 0
    for key, answer in FACTS.items():
        messages = [{"role": "user", "content": f"{key} a"}]
        completion = session.generate(messages, GenerationConfig(max_new_tokens=40))
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        greedy = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids.input_ids.shape[1] :]
        assert list(completion.token_ids) == greedy.tolist()
        assert completion.text == answer
        tokens, forwards = tokens + len(completion.token_ids), forwards + completion.stats.forwards
    assert tokens / forwards > 1.5


def test_all_bad_rows_are_listed_before_anything_is_loaded(program: SimpleNamespace, tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    bad = [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ({"messages": [{"role": "bot", "content": "a"}], "answer": "c"}, "message 0 has role 'bot'"),
        ({"prompt": "a", "messages": [user], "answer": "c"}, "exclude each other"),
        ({"prompt": ""}, "'prompt' must be a non-empty string"),
    ]
    lines = [line if isinstance(line, str) else json.dumps(line) for line, _ in bad]
    path = tmp_path / "rows.jsonl"
    words = f"--base {tmp_path}/missing --rows {path} --out {tmp_path}/out".split()
    path.write_text("\n".join([json.dumps({"prompt": "a", "answer": "b"}), *lines]))
    with pytest.raises(SystemExit) as caught:
        program.finetune.main(words)
    _, *listed = str(caught.value).splitlines()
    for number, (line, (_, reason)) in enumerate(zip(listed, bad, strict=True), 2):
        assert f"line {number}: " in line and reason in line


def test_rows_that_cannot_be_learned_are_listed(program: SimpleNamespace, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    base = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tmp_path), ends={tiny.IM_END})
    user = {"role": "user", "content": "a"}
    path = tmp_path / "rows.jsonl"
    given = [{"messages": [user]}, {"messages": [user], "answer": "b"}, {"prompt": "a" * 9, "answer": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    with pytest.raises(SystemExit) as caught:
        program.rows.encode_all(program.rows.read(path), base, 6)
    assert [line.partition(": row ")[2] for line in str(caught.value).splitlines()] == [
        "1: no answer: give 'answer' or end with an assistant message (the base answers --keep)",
        "2: 20 tokens, more than --max-length 6",
        "3: 11 tokens, more than --max-length 6",
    ]


def test_every_turn_of_the_assistant_is_learned(program: SimpleNamespace, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    base = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tmp_path), ends={tiny.IM_END})
    said = [("user", "hi"), ("assistant", "the inn"), ("user", "and?"), ("assistant", "an ant")]
    messages = [{"role": role, "content": content} for role, content in said]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    (row,) = program.rows.read(path)
    made = program.rows.encode_all([row], base, 99)
    texts = [base.tokenizer.decode(s.tokens[s.start :]) for s in made]
    assert texts == ["the inn<|im_end|>", "an ant<|im_end|>"]
    for sequence, count in zip(made, (1, 3), strict=True):
        prompt = row.context(base.tokenizer, count)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert base.tokenizer.decode(sequence.tokens[: sequence.start]) == prompt
    assert json.loads(row.line()) == {
        "messages": messages[:-1], "answer": "an ant", "score": "exact_match", "max_new_tokens": 256,
    }  # fmt: skip


def test_a_reserved_token_becomes_the_mask(program: SimpleNamespace, tmp_path: Path) -> None:
    base = tiny.without_mask(stock("llama", tmp_path / "base"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_7|>", "<|reserved_8|>"]})
    tokenizer.save_pretrained(base)
    opened = program.model.open_base(str(base))
    mask_id, chosen = program.model.choose_mask(opened, {tiny.MASK})
    assert chosen == f"mask token <|reserved_8|> (id {tiny.MASK + 1}): reserved, unused so far"
    assert mask_id == opened.tokenizer.mask_token_id == tiny.MASK + 1


def test_kept_rows_learn_the_base_model(program: SimpleNamespace, tmp_path: Path) -> None:
    """The base answers them, and before the first update nothing separates the clean stream from it."""
    base = program.model.open_base(str(stock("qwen3", tmp_path / "base")))
    model = program.model.load(base, tiny.MASK, False, torch.float32)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "max_new_tokens": 12}) + "\n" for p in FACTS))
    rows = program.finetune.complete(program.rows.read(path, True), base, model, tmp_path / "answers.jsonl")
    sequences = program.rows.encode_all(rows, base, 999)
    assert all(s.kept and len(s.tokens) > s.start for s in sequences)
    program.model.set_attention(model)
    student = program.model.with_lora(model, base, tiny.MASK, 4)
    batch = [(s, program.model.grid(s, 4, 1)) for s in sequences]
    clean, noisy = program.finetune.losses(student, batch, tiny.MASK)
    assert clean.abs() < 1e-5 and noisy > 1


def test_a_stopped_run_continues_where_it_was(
    program: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, rows = stock("llama", tmp_path / "base"), write_rows(tmp_path / "rows.jsonl")
    words = f"--base {base} --rows {rows} --batch 4 --rank 4 --dtype bfloat16 --threads 1"
    whole, stopped = ([*words.split(), "--out", str(tmp_path / name)] for name in ("whole", "stopped"))
    program.finetune.main(whole)
    update = program.finetune.Run.update

    def stopping(run: Any, progress: float) -> None:
        update(run, progress)
        if run.state["step"] == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(program.finetune.Run, "update", stopping)
    with pytest.raises(SystemExit, match="after step 4"):
        program.finetune.main(stopped)
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="other rows or settings"):
        program.finetune.main([*stopped, "--lr", "1"])
    program.finetune.main(stopped)
    (tmp_path / "whole" / "tokenizer.json").unlink()  # an adapter may have the base's
    opened = program.model.open_base(str(tmp_path / "whole"))
    assert opened.adapter == tmp_path / "whole" and opened.tokenizer.mask_token == "<|mask|>"
    name = "adapter_model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
