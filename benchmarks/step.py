"""What a step of several bundles costs by its slots, what of it is outside ONNX Runtime, and how long a bundle takes to open.

    python benchmarks/step.py BUNDLE... [--threads 2] [--rounds 20] [--json FILE] [--genai PYTHON --genai-model DIRECTORY]

Rounds are interleaved: each runs every bundle at every number of slots, and one token of the peer. Times are of one row at cursor 128,
in milliseconds. On a busy machine read the CPU time of `--threads 1`, which other processes hardly change, and not the wall clock.
DIRECTORY is what onnxruntime-genai's model builder wrote from the same weights; PYTHON is that of a virtual environment with
onnxruntime-genai. The peer is timed by that process, at the same cursor and with the same threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

from mars_export.runtime import GenerationConfig, Session

SLOTS = (1, 2, 4, 8, 15)
CURSOR = 128
DECODED = 24  # tokens of an answer whose host time is measured
# One line in, one out: the times of a token after CURSOR others. Runs in the peer's own environment.
PEER = f"""
import json, sys, time
import onnxruntime_genai as og
config = og.Config(sys.argv[1])
config.clear_providers()
config.overlay(json.dumps({{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": int(sys.argv[2])}}}}}}}}))
model = og.Model(config)
for line in sys.stdin:
    params = og.GeneratorParams(model)
    params.set_search_options(max_length={CURSOR + 16}, do_sample=False, min_length={CURSOR + 16})
    generator = og.Generator(model, params)
    generator.append_tokens([1 + i % 200 for i in range({CURSOR})])
    generator.generate_next_token()
    taken = []
    for _ in range(int(line)):
        wall, cpu = time.perf_counter(), time.process_time()
        generator.generate_next_token()
        taken.append([1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)])
    print(json.dumps(taken), flush=True)
"""


class Times:
    """Wall and CPU milliseconds of something done again and again."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def add(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)

    def measure(self, work: Callable[[], object]) -> None:
        wall, cpu = perf_counter(), process_time()
        work()
        self.add(1000 * (perf_counter() - wall), 1000 * (process_time() - cpu))

    def summary(self) -> dict[str, float]:
        found = {"median": median(self.wall), "smallest": min(self.wall), "smallest_cpu": min(self.cpu)}
        return {name: round(value, 3) for name, value in found.items()}


class Clocked:
    """An ONNX Runtime session whose runs are timed."""

    def __init__(self, session: object) -> None:
        self._session, self.inside = session, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: object) -> None:
        begun = process_time()
        self._session.run_with_iobinding(binding)  # type: ignore[attr-defined]
        self.inside += process_time() - begun


def step_of(session: Session, slots: int) -> Callable[[], object]:
    cache = session.backend.new_cache(1)
    cache.reserve(CURSOR + slots)
    ids, index = np.full((1, slots), 5, np.int64), np.arange(slots, dtype=np.int64)[None]
    return lambda: session.backend.step(cache, 0, ids, np.array([CURSOR], np.int64), index, False)


def host_time(session: Session, tau: float) -> list[tuple[float, float]]:
    """CPU milliseconds of each decode step of an answer: outside ONNX Runtime, and in all."""
    backend: object = session.backend
    clocked = backend._session = Clocked(backend._session)  # type: ignore[attr-defined]
    stream = iter(
        session.stream(
            [1 + i % 200 for i in range(CURSOR)],
            GenerationConfig(tau=tau, max_new_tokens=DECODED, eos_ids=()),
        )
    )
    next(stream)
    found = []
    for _ in range(DECODED):
        clocked.inside, begun = 0.0, process_time()
        if next(stream, None) is None:
            break
        whole = process_time() - begun
        found.append((1000 * (whole - clocked.inside), 1000 * whole))
    backend._session = clocked._session  # type: ignore[attr-defined]
    return found


def peer_of(python: Path, model: Path, threads: int) -> subprocess.Popen[str]:
    command = [str(python), "-c", PEER, str(model), str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(peer: subprocess.Popen[str], tokens: int, times: Times) -> None:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{tokens}\n")
    peer.stdin.flush()
    for wall, cpu in json.loads(peer.stdout.readline()):
        times.add(wall, cpu)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--genai", type=Path)
    parser.add_argument("--genai-model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (args.genai is None) != (args.genai_model is None):
        parser.error("--genai and --genai-model go together")
    opened, sessions = {path.name: Times() for path in args.bundles}, {}
    for path in args.bundles:
        Session.open(path, threads=args.threads)  # the first one may hash the files
        opened[path.name].measure(
            lambda path=path: sessions.update({path.name: Session.open(path, threads=args.threads)})
        )  # type: ignore[misc]
    works = {(name, slots): step_of(session, slots) for name, session in sessions.items() for slots in SLOTS}
    steps = {key: Times() for key in works}
    peer, token = (
        (peer_of(args.genai, args.genai_model, args.threads), Times()) if args.genai else (None, Times())
    )
    for _ in range(args.rounds):
        for key, work in works.items():
            work()  # the weights of another bundle are in the processor's cache
            for _ in range(3):
                steps[key].measure(work)
        if peer is not None:
            ask(peer, 4, token)
    result = {}
    for name, session in sessions.items():
        host = host_time(session, 1.0) + host_time(session, 1.0)
        share = min(outside for outside, _ in host) / min(whole for _, whole in host)
        ran = {str(slots): steps[name, slots].summary() for slots in SLOTS}
        result[name] = {"step": ran, "host_share_one_token": round(share, 4), "open": opened[name].summary()}
        line = "  ".join(
            f"{slots}: {entry['median']:.1f} ({entry['smallest']:.1f}, cpu {entry['smallest_cpu']:.1f})"
            for slots, entry in ran.items()
        )
        print(f"{name:24} {line}  outside {share:.1%}  open {opened[name].wall[0] / 1000:.2f} s")
    if peer is not None:
        assert peer.stdin is not None
        peer.stdin.close()
        peer.wait()
        result["onnxruntime-genai"] = {"token": token.summary()}
        print(f"{'onnxruntime-genai':24} token: {token.summary()}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(
                {"threads": args.threads, "rounds": args.rounds, "cursor": CURSOR, "ms": result}, indent=2
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
