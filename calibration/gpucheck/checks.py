"""What must be right of a bundle on a device. Each check is one function of the subject."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from ...runtime import Batcher, Commit, Completion, GenerationConfig, Limits, MarsError
from ...runtime.device.name import DeviceName
from .outcome import Found, NotHere
from .subject import Subject, same

# Operators that carry the work: on a GPU session none of them may be left to the CPU.
HEAVY = {
    "Attention", "GroupQueryAttention", "MatMul", "MatMulNBits", "MatMulInteger", "Gemm", "TensorScatter",
    "RotaryEmbedding", "RMSNormalization", "SkipSimplifiedLayerNormalization", "ArgMax", "ReduceLogSumExp",
}  # fmt: skip
MOST_DIFFERENT = 0.1  # of answers in half precision or integer codes: ties are broken the other way
TAU, LOW_TAU = 0.95, 0.5
CLIENTS = 8
WORDS = ("yes", "no", "perhaps")
PIECE, LONG = 256, 600  # tokens of a piece that a prefix store keeps on any device, and of a prompt with two


def opens(subject: Subject) -> Found:
    """A session opens, and no operator that carries work is left to the CPU."""
    session = subject.session
    left: dict[str, int] = getattr(session.backend, "on_cpu", {})
    heavy = sorted(left.keys() & HEAVY)
    words = ", ".join(f"{count} {name}" for name, count in left.items()) or "nothing"
    detail = f"variant {session.variant.name}, {session.variant.precision}; left to the CPU: {words}"
    return Found(not heavy, detail, {"variant": session.variant.name, "on_cpu": left})


def stays(subject: Subject) -> Found:
    """KV rows are in the device's memory, and no step copies them to the host."""
    backend: Any = subject.session.backend
    memory = getattr(backend, "_memory", None)
    if subject.session.variant.is_engine:
        return Found(True, "an engine's KV rows are never anywhere else")
    if memory is None:
        raise NotHere("this backend does not say where its KV rows are")
    device, binds_anew = memory.device, backend._binds_anew
    detail = f"KV rows in {device} memory" + ("; bound anew each step, with copies" if binds_anew else "")
    is_there = device == DeviceName.of(subject.device).kind
    return Found(is_there and not binds_anew, detail, {"kv_device": device})


def tokens(subject: Subject) -> Found:
    """One-token answers are those of the same graph on the CPU."""
    if subject.device == "cpu":
        raise NotHere("the device is the CPU itself")
    settings = subject.config.with_values(tau=1.0)
    try:
        expected = subject.answers(subject.on_cpu, settings)
    except MarsError as error:
        raise NotHere(f"the graph does not run on the CPU: {error}") from error
    return _agreement(subject, subject.answers(subject.session, settings), expected, "as on the CPU")


def exact(subject: Subject) -> Found:
    """Exact mode's answers are those of one token at a time."""
    plain = subject.answers(subject.session, subject.config.with_values(tau=1.0))
    fast = subject.answers(subject.session, subject.config)
    found = _agreement(subject, fast, plain, "as one token at a time")
    per_forward = sum(a.stats.tokens for a in fast) / max(1, sum(a.stats.forwards for a in fast))
    figures = {**found.figures, "tokens_per_forward": round(per_forward, 3)}
    return Found(found.good, f"{found.detail}; {per_forward:.2f} tokens per forward", figures)


def batches(subject: Subject) -> Found:
    """Answers of clients that share a batch are the answers of each alone, whatever their settings."""
    base = subject.config
    kinds = (base, base.with_values(tau=1.0), base.with_values(tau=TAU, window=subject.block))
    jobs = [(prompt, kinds[i % len(kinds)]) for i, prompt in enumerate(subject.prompts)]
    alone = [subject.session.generate(prompt, settings) for prompt, settings in jobs]
    clients = subject.most_rows(CLIENTS)
    with ThreadPoolExecutor(clients) as pool, Batcher(subject.session, Limits(max_rows=clients)) as service:
        waiting = [pool.submit(lambda job: service.submit(*job, wait=None).result(), job) for job in jobs]
        together = [answer.result() for answer in waiting]
    return _agreement(subject, together, alone, "as alone")


def block_commit(subject: Subject) -> Found:
    """The paper's loop runs, and one-token answers do not depend on the loop."""
    settings, commit = subject.config.with_values(tau=1.0), Commit("block")
    prompts = subject.prompts[:4]
    cursor = [subject.session.generate(prompt, settings) for prompt in prompts]
    block = [subject.session.generate(prompt, settings, commit=commit) for prompt in prompts]
    return _agreement(subject, block, cursor, "as with cursor commit")


def prefixes(subject: Subject) -> Found:
    """A prompt that was read before is not read again, and its answer is the same."""
    session, settings = subject.open(cache_bytes=256 << 20), subject.config
    room = session.backend.max_capacity - settings.max_new_tokens - 2 * subject.block
    if room <= PIECE:
        raise NotHere(f"rows hold {session.backend.max_capacity} tokens; pieces of {PIECE} are kept")
    longest = max(subject.prompts, key=len)
    prompt = (list(longest) * LONG)[: min(LONG, room)]
    first, again = (session.generate(prompt, settings) for _ in range(2))
    cached = again.stats.cached_tokens
    found = _agreement(subject, [again], [first], "as without the store")
    figures = {**found.figures, "cached_tokens": cached, "prompt_tokens": len(prompt)}
    return Found(found.good and cached > 0, f"{cached} of {len(prompt)} prompt tokens were there", figures)


def captured(subject: Subject) -> Found:
    """Steps that the provider captures are replayed, and the answers are those of plain steps."""
    if subject.device == "cpu":
        raise NotHere("a CPU captures nothing")
    if subject.session.variant.is_engine:
        raise NotHere("an engine's steps are captured anyway")
    session, settings = subject.open(options={"enable_cuda_graph": "1"}), subject.config
    plain = subject.answers(subject.session, settings)
    found = _agreement(subject, subject.answers(session, settings), plain, "as from plain steps")
    backend: Any = session.backend
    figures = {**found.figures, "graphs": backend.num_graphs}
    if backend.why_no_graphs is not None:
        return Found(False, f"steps are not captured: {backend.why_no_graphs}; {found.detail}", figures)
    good = found.good and backend.num_graphs > 0
    return Found(good, f"{backend.num_graphs} steps captured; {found.detail}", figures)


def grammars(subject: Subject) -> Found:
    """A choice among words is kept to, by the likeliest tokens that a step computes, or by its logits where
    none of these is allowed.
    """
    session = subject.session
    if "logits" not in session.backend.outputs or find_spec("llguidance") is None:
        raise NotHere("it takes a bundle exported with --logits and the `grammar` extra")
    if session.bundle.manifest.text is None:
        raise NotHere("the bundle has no tokenizer")
    settings = subject.config.with_values(choice=WORDS)
    said = [session.generate(prompt, settings).text for prompt in subject.prompts[:4]]
    kept = sum(text in WORDS for text in said)
    return Found(kept == len(said), f"{kept} of {len(said)} answers are one of the words", {"said": said})


def sampling(subject: Subject) -> Found:
    """The same seed draws the same text twice."""
    if "logits" not in subject.session.backend.outputs:
        raise NotHere("the bundle has no logits (export with --logits)")
    settings = subject.config.with_values(temperature=0.8, seed=3, window=subject.block)
    one, other = (subject.answers(subject.session, settings) for _ in range(2))
    return _agreement(subject, one, other, "twice the same")


def recovers(subject: Subject) -> Found:
    """A request that cannot be served fails alone, with our error, and the next one is answered."""
    session, prompt = subject.session, subject.prompts[0]
    settings = GenerationConfig(max_new_tokens=4)
    before = session.generate(prompt, settings)
    too_long = [prompt[0]] * (session.backend.max_capacity + 1)
    try:
        session.generate(too_long, settings)
    except MarsError as error:
        refusal = str(error)
    else:
        return Found(False, f"a prompt of {len(too_long)} tokens was taken")
    after = session.generate(prompt, settings)
    return Found(
        before.token_ids == after.token_ids, f"refused in words ({refusal.splitlines()[0]}), then right"
    )


def _agreement(subject: Subject, ours: list[Completion], theirs: list[Completion], words: str) -> Found:
    equal, count = same(ours, theirs), len(ours)
    least = count if subject.is_exact_arithmetic else count - max(1, int(MOST_DIFFERENT * count))
    detail = f"{equal} of {count} answers {words}"
    if equal < count and equal >= least:
        detail += f" ({subject.session.variant.precision} breaks ties by the size of a step)"
    return Found(equal >= least, detail, {"equal": equal, "answers": count})
