"""The words and structures of mars.h, as ctypes has them."""

from __future__ import annotations

import ctypes as c

METRICS = {"probability": 0, "margin": 1, "entropy": 2}
MASKS = {"auto": -1, "full": -2}
TAUS = {None: -1.0}  # MARS_EXACT
REASONS = {0: None, 1: "eos", 2: "stop", 3: "length", 4: "capacity", 5: "cancelled", 6: "deadline"}
COUNTS = ("prompt_tokens", "tokens", "forwards", "prefill_forwards", "tokens_after_first")
TIMES = ("prefill_time", "decode_time", "time_to_first_token", "tokens_per_forward", "tokens_per_second")
ON_LOG = c.CFUNCTYPE(None, c.c_int32, c.c_char_p, c.c_void_p)
LEVELS = ("debug", "info", "warning", "error")
VERIFY = {"once": 0, "always": 1, "never": 2}


class SessionOptions(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("device", c.c_char_p),
        ("threads", c.c_int32),
        ("verify", c.c_int32),
        ("variant", c.c_char_p),
        ("cache_bytes", c.c_int64),
        ("safe", c.c_int32),
        ("parse_special", c.c_int32),
        ("option_names", c.POINTER(c.c_char_p)),
        ("option_values", c.POINTER(c.c_char_p)),
        ("num_options", c.c_size_t),
        ("on_log", ON_LOG),
        ("log_user", c.c_void_p),
        ("cuda_stream", c.c_void_p),
        ("prefill_tokens", c.c_int64),
    )


class Config(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("tau", c.c_double),
        ("metric", c.c_int32),
        ("cache_block", c.c_int64),
        ("max_new_tokens", c.c_int64),
        ("masks", c.c_int64),
        ("eos_ids", c.POINTER(c.c_int64)),
        ("num_eos_ids", c.c_size_t),
        ("stop", c.POINTER(c.c_char_p)),
        ("num_stop", c.c_size_t),
        ("temperature", c.c_double),
        ("top_k", c.c_int64),
        ("top_p", c.c_double),
        ("seed", c.c_uint64),
        ("repetition_penalty", c.c_double),
        ("prompt_lookup", c.c_int64),
        ("min_p", c.c_double),
        ("cache_salt", c.c_char_p),
        ("deadline", c.c_double),
        ("grammar", c.c_char_p),
        ("masks_of_tau", c.c_int32),
    )


class Prompt(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("text", c.c_char_p),
        ("text_size", c.c_size_t),
        ("messages", c.c_char_p),
        ("token_ids", c.POINTER(c.c_int64)),
        ("num_token_ids", c.c_size_t),
    )


class SessionInfo(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        *((name, c.c_int64) for name in ("vocab_size", "context_length", "block", "mask_id")),
        ("has_text", c.c_int32),
        ("reserved", c.c_int32),
        *((name, c.c_char_p) for name in ("variant", "backend", "precision", "device")),
        ("eos_ids", c.POINTER(c.c_int64)),
        ("num_eos_ids", c.c_size_t),
        ("profiles", c.POINTER(c.c_char_p)),
        ("num_profiles", c.c_size_t),
        ("outputs", c.POINTER(c.c_char_p)),
        ("num_outputs", c.c_size_t),
        ("max_rows", c.c_int64),
    )


class Event(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("row", c.c_int64),
        ("text", c.c_char_p),
        ("text_size", c.c_size_t),
        ("token_ids", c.POINTER(c.c_int64)),
        ("confidences", c.POINTER(c.c_double)),
        ("num_tokens", c.c_size_t),
        ("finish_reason", c.c_int32),
    )


class CStats(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        *((name, c.c_int64) for name in COUNTS),
        *((name, c.c_double) for name in TIMES),
        ("accepted", c.POINTER(c.c_int64)),
        ("num_accepted", c.c_size_t),
        *((name, c.c_int64) for name in ("draft_tokens", "accepted_draft_tokens", "rejected_draft_tokens")),
        ("queue_time", c.c_double),
        ("cached_tokens", c.c_int64),
        ("forced", c.c_int64),
    )


PREFIX_COUNTS = (
    *("queries", "hits", "query_tokens", "hit_tokens", "saved", "evicted", "failed"),
    *("entries", "num_bytes"),
)


class CPrefixStats(c.Structure):
    _fields_ = (("struct_size", c.c_size_t), *((name, c.c_int64) for name in PREFIX_COUNTS))
