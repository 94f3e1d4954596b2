"""The trained 260k-parameter TinyStories model (llama2.c's format) as a Hugging Face directory.

llama2.c's first format is seven int32 (dim, hidden, layers, heads, kv heads, vocabulary, longest sequence), followed by
float32 tensors, each kind for all layers at once. llama2.c rotates neighbouring elements of a head (0 with 1, 2 with
3); Hugging Face rotates an element of the first half with its partner in the second, so rows of q and k move.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS = 1, 2


def write(source: Path, output: Path) -> Path:
    """Converts `stories260K.bin` and `tok512.bin` of the folder `source` into the directory `output`."""
    model = read_model(source / "stories260K.bin")
    model.save_pretrained(output)
    tokenizer(read_pieces(source / "tok512.bin", model.config.vocab_size)).save_pretrained(output)
    return output


def read_model(file: Path) -> LlamaForCausalLM:
    """Returns the model in float32, with tied embeddings."""
    numbers = file.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, longest = struct.unpack("7i", numbers[:28])
    weights = np.frombuffer(numbers, dtype=np.float32, offset=28)
    head, place = dim // heads, 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return torch.from_numpy(weights[place - count : place].reshape(shape).copy())

    def halves(rows: torch.Tensor, count: int) -> torch.Tensor:
        return rows.view(layers, count, head // 2, 2, dim).transpose(2, 3).reshape(layers, count * head, dim)

    state = {"model.embed_tokens.weight": take(vocabulary, dim)}
    stacked = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": halves(take(layers, heads * head, dim), heads),
        "self_attn.k_proj": halves(take(layers, kv_heads * head, dim), kv_heads),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, heads * head),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    state["model.norm.weight"] = take(dim)
    state |= {f"model.layers.{i}.{k}.weight": v[i] for k, v in stacked.items() for i in range(layers)}

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=longest,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def read_pieces(file: Path, vocabulary: int) -> list[tuple[str, float]]:
    """Returns the tokenizer's pieces by id, each with a score."""
    data, at, pieces = file.read_bytes(), 4, []
    for _ in range(vocabulary):
        score, length = struct.unpack_from("fi", data, at)
        pieces.append((data[at + 8 : at + 8 + length].decode("utf-8"), score))
        at += 8 + length
    return pieces


def tokenizer(pieces: list[tuple[str, float]]) -> PreTrainedTokenizerFast:
    """Returns SentencePiece's BPE: the pair with the best score as a whole is merged first; unknown characters become
    bytes."""
    names = ["<unk>", "<s>", "</s>"] + [piece.replace(" ", "▁") for piece, _ in pieces[3:]]
    ids = {name: i for i, name in enumerate(names)}
    merges = sorted(
        (-pieces[i][1], len(name[:cut]), name[:cut], name[cut:])
        for name, i in ids.items()
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    )
    backend = Tokenizer(
        models.BPE(ids, [(a, b) for _, _, a, b in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
