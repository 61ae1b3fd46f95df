"""A tiny checkpoint of every family beyond the first four, with all that its config can turn, and what it
means that a bundle of it is right.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mars_export import Session
from support import tiny
from support.agreement import LOOPS, NEW, PROMPTS, config
from support.exports import export
from support.graphs import KEPT, TOKENS, forward
from support.oracle import Oracle, generate
from support.tiny import Tiny

FULL, SLIDING = "full_attention", "sliding_attention"
SHORT, LONG = [1.0, 1.1, 1.3, 1.4, 2.0, 3.0], [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 10000.0}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
GEMMA3 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "layer_types": [SLIDING, SLIDING, FULL],
}
BY_KIND = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}

FAMILIES = {
    made.name: made
    for made in (
        Tiny("gemma2", "gemma2", {"head_dim": 16, "num_hidden_layers": 3, "query_pre_attn_scalar": 20,
         "sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 25.0}, tied=True),
        Tiny("gemma2-mha", "gemma2", {"head_dim": 12, "num_key_value_heads": 4, "query_pre_attn_scalar": 12,
         "attention_bias": True, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None,
         "layer_types": [FULL, SLIDING], "sliding_window": 9}),
        Tiny("gemma3", "gemma3_text", GEMMA3 | {"rope_parameters": BY_KIND}, tied=True),
        Tiny("gemma3-v4", "gemma3_text", GEMMA3 | {"final_logit_softcapping": 30.0,
         "rope_parameters": {FULL: BY_KIND[FULL] | {"rope_theta": 5e5},
         SLIDING: BY_KIND[SLIDING] | {"rope_theta": 2e3}}}, rewritten={"rope_parameters": None,
         "layer_types": None, "rope_theta": 5e5, "rope_local_base_freq": 2e3,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3}),
        Tiny("gemma3-sliding", "gemma3_text", GEMMA3 | {"layer_types": [SLIDING] * 3,
         "rope_parameters": {SLIDING: BY_KIND[SLIDING]}}, tied=True),
        Tiny("smollm3", "smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 3}, tied=True),
        Tiny("smollm3-windows", "smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True,
         "sliding_window": 7, "attention_bias": True, "mlp_bias": True}),
        Tiny("phi3", "phi3", {"sliding_window": 11}, sharded=True),
        Tiny("phi4-mini", "phi3", {"hidden_size": 64, "max_position_embeddings": 512,
         "original_max_position_embeddings": 128,
         "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}}, tied=True, seed=1),
        Tiny("granite", "granite", {"attention_multiplier": 0.15, "embedding_multiplier": 3.0,
         "residual_multiplier": 0.6, "logits_scaling": 0.8}, tied=True),
        Tiny("ministral3", "ministral3", {"head_dim": 12, "rope_parameters": GROWING}, seed=3),
        Tiny("olmo2", "olmo2", {"attention_bias": True}),
        Tiny("olmo2-mha", "olmo2", {"num_key_value_heads": 4}, tied=True),
        Tiny("exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window": 6,
         "sliding_window_pattern": 2}),
        Tiny("exaone4-full", "exaone4", {"sliding_window": None, "sliding_window_pattern": None,
         "layer_types": [FULL, FULL]}, tied=True),
        Tiny("ernie", "ernie4_5", {"head_dim": 16, "use_bias": True}, tied=True),
        Tiny("hunyuan", "hunyuan_v1_dense", {"head_dim": 12, "attention_bias": True}),
        Tiny("hunyuan-alpha", "hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic",
         "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}}, tied=True),
        Tiny("seed-oss", "seed_oss", {"head_dim": 20, "attention_out_bias": True, "mlp_bias": True}),
        Tiny("helium", "helium", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    )
}  # fmt: skip
RECURRENT, SIZES = (
    "linear_attention",
    {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "linear_key_head_dim": 8},
)
HYBRIDS = {
    made.name: made
    for made in (
        Tiny("hybrid", "qwen3_5_text", SIZES | {"linear_value_head_dim": 16, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "layer_types": [RECURRENT] * 3 + [FULL]}),
        Tiny("hybrid-tied", "qwen3_5_text", SIZES | {"linear_value_head_dim": 8, "linear_num_key_heads": 3,
         "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "attention_bias": True,
         "layer_types": [FULL, RECURRENT, RECURRENT, FULL, RECURRENT]}, tied=True, seed=2),
    )
}  # fmt: skip
ALL = tiny.TINIES | FAMILIES | HYBRIDS


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a bundle is from transformers: the largest logit error over all positions, fed whole and in
    pieces, the spread of the logits, and how many answers have the sampler's tokens.
    """

    logit_error: float
    spread: float
    equal: int
    answers: int


def judge(made: Tiny, kv_layout: str = "in-place") -> Agreement:
    """Export `made` in fp32 and compare it with transformers: logits, and greedy answers at tau 0.3."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = tiny.write(made, Path(scratch) / "checkpoint")
        export(directory, Path(scratch) / "bundle", block=6, metrics=True, logits=True, kv_layout=kv_layout)
        oracle = Oracle(tiny.load(made, directory), tiny.MASK, 6)
        session = Session.open(Path(scratch) / "bundle", threads=1, cache_bytes=0)
        return compare(session, oracle)


def compare(session: Session, oracle: Oracle, loops: tuple[str, ...] = ("cursor", "block-4")) -> Agreement:
    expected = oracle.logits(TOKENS).numpy()
    error = 0.0
    for cuts in ((), (1,), (3, 17, 18, 40)):
        found = forward(session, TOKENS, cuts)[-1]
        error = max(error, float(np.abs(found - expected)[:, KEPT].max()))
    equal = answers = 0
    for name in loops:
        cache_block = LOOPS[name]
        settings = config(0.3, masks="full")
        texts = [generate(oracle, prompt, 0.3, max_new=NEW, cache_block=cache_block) for prompt in PROMPTS]
        for completion, text in zip(
            session.generate_batch(PROMPTS, settings, cache_block=cache_block), texts, strict=True
        ):
            answers += 1
            equal += list(completion.token_ids) == text.tokens
    return Agreement(error, float(expected.std()), equal, answers)
