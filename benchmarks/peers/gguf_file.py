"""A Llama-type Hugging Face directory as GGUF files for llama.cpp.

They have the vocabulary (byte-level BPE) and the chat template. Runs in llama.cpp's environment.

python -m peers.gguf_file DIRECTORY OUT --kinds q4_0 q8_0 [--quantizer llama-quantize]
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS = ("q4_0", "q4_k_m", "q8_0", "f16")
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring numbers of a head, Hugging Face's Llama its two halves: rows change
    places. [heads * d, in]
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_vocabulary(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """Tokens, merges, special tokens and the chat template."""
    model = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    if model["model"]["type"] != "BPE":
        raise SystemExit(f"{directory}: only byte-level BPE can be written, not {model['model']['type']}")
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, i in model["model"]["vocab"].items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for added in model["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or ["a b"])  # llama.cpp opens no vocabulary without merges
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)
    template = directory / "chat_template.jinja"
    has_file = template.is_file()
    writer.add_chat_template(template.read_text("utf-8") if has_file else settings.get("chat_template", ""))


def write_fp32(directory: Path, target: Path) -> None:
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("rope_scaling"):
        raise SystemExit(
            f"{directory}: only plain Llama models without biases or scaled rotary angles can be written,"
            f" not {config['model_type']}"
        )
    heads, kv_heads, layers = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["num_hidden_layers"],
    )
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    write_vocabulary(writer, directory, config)
    with safe_open(directory / "model.safetensors", "np") as tensors:

        def read(name: str) -> np.ndarray:
            return tensors.get_tensor(name).astype(np.float32, copy=False)

        writer.add_tensor("token_embd.weight", read("model.embed_tokens.weight"))
        for i in range(layers):
            for source, name in LINEARS.items():
                weight = read(f"model.layers.{i}.{source}.weight")
                count = {"attn_q": heads, "attn_k": kv_heads}.get(name)
                writer.add_tensor(
                    f"blk.{i}.{name}.weight",
                    weight if count is None else np.ascontiguousarray(interleaved(weight, count)),
                )
        writer.add_tensor("output_norm.weight", read("model.norm.weight"))
        if not config["tie_word_embeddings"]:
            writer.add_tensor("output.weight", read("lm_head.weight"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str, threads: int, program: Path | None) -> None:
    """With llama.cpp's own llama-quantize, or as it does it."""
    if program is not None:
        subprocess.run([program, source, target, kind, str(threads)], check=True)
        return
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    partial = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), params):
        raise SystemExit(f"{source}: llama.cpp could not quantize it to {kind}")
    partial.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantizer", type=Path, help="llama.cpp's llama-quantize")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plain = args.out / "fp32.gguf"
    if not plain.exists():
        write_fp32(args.directory, plain.with_suffix(".part"))
        plain.with_suffix(".part").rename(plain)
    for kind in args.kinds:
        if not (args.out / f"{kind}.gguf").exists():
            quantize(plain, args.out / f"{kind}.gguf", kind, args.threads, args.quantizer)


if __name__ == "__main__":
    main()
