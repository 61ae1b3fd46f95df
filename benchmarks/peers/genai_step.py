"""Tokens of onnxruntime-genai for `benchmarks/steps.py cost`: MODEL THREADS CURSOR. Runs beside the peer.

One line in, a number of tokens; one line out, the [wall, CPU] milliseconds of each, made after CURSOR others.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter, process_time

import onnxruntime_genai as og


def main(directory: str, threads: int, cursor: int) -> None:
    config = og.Config(directory)
    config.clear_providers()
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)
    for line in sys.stdin:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=cursor + 16, do_sample=False, min_length=cursor + 16)
        generator = og.Generator(model, params)
        generator.append_tokens([1 + i % 200 for i in range(cursor)])
        generator.generate_next_token()
        taken = []
        for _ in range(int(line)):
            wall, cpu = perf_counter(), process_time()
            generator.generate_next_token()
            taken.append([1000 * (perf_counter() - wall), 1000 * (process_time() - cpu)])
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
