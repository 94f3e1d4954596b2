"""tokenizer.json of a model with a tiktoken vocabulary: `python -m skyrl_mega.hf_checkpoint.tokenizer_json DIR`.

Moonlight and Kimi-K2 have `tiktoken.model`, the bytes of each token, and Python code that reads the file. The code is
not run. Its regular expression for words (`pat_str`) is read as text, special tokens come from tokenizer_config.json,
and the converter of transformers does the rest. The result is written only if it encodes like tiktoken itself.
"""

from __future__ import annotations

import ast
import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer

from skyrl_mega.cluster.atomic_output import atomic_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import check_folder, read, read_json
from skyrl_mega.common.values import shown
from skyrl_mega.config.command import DONE, Parser, guarded, path_of
from skyrl_mega.hf_checkpoint.tokenizer import ALWAYS, KNOWN, TIKTOKEN

PATTERN = "pat_str"
"""Name of the regular expression in the model's code."""
FETCH = "fetch the directory again"
JOINED = 20_000
"""Number of texts of several random tokens that are compared."""
SPECIAL = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
"""Properties of a token that tokenizer_config.json does not name."""


def write(folder: Path) -> Path:
    """Writes tokenizer.json into the model's directory `folder`, and returns its path. The file appears only when it is
    complete and proved equal to tiktoken; nothing is replaced.

    Raises:
        UserError: A file is missing or cannot be used, tokenizer.json exists, or the result differs from tiktoken.
        OSError: tokenizer.json cannot be written.
    """
    check_folder(folder, FETCH)
    file = folder / "tokenizer.json"
    if file.exists():
        raise UserError("it exists", key=file, fix="remove it to make it again")
    ranks = read_vocabulary(folder / TIKTOKEN)
    pattern, added = read_pattern(folder), read_added_tokens(folder, len(ranks))
    tokenizer = convert(ranks, pattern, added)
    check_equal(tokenizer, ranks, pattern, {token.content: number for number, token in added.items()})
    with atomic_file(file, str(folder), lambda path: False) as partial:
        tokenizer.save(str(partial))
    return file


def read_vocabulary(file: Path) -> dict[bytes, int]:
    """Returns the number of each token's bytes; numbers are also the order of merges. The vocabulary contains every
    single byte.

    Raises:
        UserError: The file is missing or cannot be read, or is no tiktoken vocabulary with all numbers from 0 on.
    """
    try:
        pairs = [line.split() for line in read(file, FETCH).splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:  # base64 raises a subclass
        raise UserError(f"it is no tiktoken vocabulary ({error})", key=file, fix=FETCH) from error
    complete = all(bytes([byte]) in ranks for byte in range(256))
    if not complete or sorted(ranks.values()) != list(range(len(pairs))):
        raise UserError("its tokens lack single bytes, or have other numbers than 0, 1, 2, …", key=file, fix=FETCH)
    return ranks


def read_pattern(folder: Path) -> str:
    """Returns the regular expression for words from the model's code, which is parsed and not run. Reads the files
    tokenization_*.py of the folder by name, until one assigns `pat_str`.

    Raises:
        UserError: No file assigns `pat_str`, the assigned value is not constant text, or a file read is not Python
            code.
    """
    for file in sorted(folder.glob("tokenization_*.py")):
        try:
            module = ast.parse(read(file, FETCH))
        except (SyntaxError, ValueError) as error:
            raise UserError(f"it is no Python code ({error})", key=file, fix=FETCH) from error
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [PATTERN]:
                if (text := _constant(node.value)) is not None:
                    return text
                raise UserError(f"{PATTERN} is not constant text", key=file, fix="write tokenizer.json by hand")
    raise UserError(f"no tokenization_*.py there assigns {PATTERN}, the pattern of words", key=folder, fix=FETCH)


def _constant(node: ast.expr) -> str | None:
    """Returns the text of a constant, or of constants joined by `"…".join([…])`; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[ast.List(elts=parts)]
        ):
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            return between.join(texts) if len(texts) == len(parts) else None
    return None


def read_added_tokens(folder: Path, first: int) -> dict[int, AddedToken]:
    """Returns the tokens beyond the vocabulary by number: those of tokenizer_config.json, and reserved ones between
    them and up to the model's `vocab_size`.

    Args:
        folder: The model's directory.
        first: Number of the first token beyond the vocabulary.

    Raises:
        UserError: tokenizer_config.json or config.json is missing or no JSON object, `added_tokens_decoder` cannot be
            used (for example, a token has no text), or a token has a number of the vocabulary.
    """
    file = folder / "tokenizer_config.json"
    listed = read_json(file, FETCH).get("added_tokens_decoder") or {}
    try:
        named = {int(number): AddedToken(**{**SPECIAL, **token}) for number, token in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"added_tokens_decoder cannot be used ({error})", key=file, fix=FETCH) from error
    if named and min(named) < first:
        raise UserError(
            f"an added token has the number {min(named)}; {TIKTOKEN} has the tokens 0 to {first - 1}",
            key=file,
            fix=FETCH,
        )
    size = read_json(folder / "config.json", FETCH).get("vocab_size")
    end = max([size if isinstance(size, int) else 0, *(number + 1 for number in named)])
    reserved = {number: AddedToken(f"<|reserved_token_{number}|>", **SPECIAL) for number in range(first, end)}
    return reserved | named


def convert(ranks: Mapping[bytes, int], pattern: str, added: Mapping[int, AddedToken]) -> Tokenizer:
    """Returns the tokenizer of a tiktoken vocabulary.

    Args:
        ranks: The number of each token's bytes.
        pattern: Regular expression for words.
        added: Tokens beyond the vocabulary, by consecutive numbers from `len(ranks)` on.

    Raises:
        UserError: The regular expression cannot be used.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter: Any = TikTokenConverter(vocab_file=TIKTOKEN, pattern=pattern)
    converter.load_tiktoken_bpe = lambda file: ranks  # tiktoken's own reader caches files by path
    try:
        tokenizer: Tokenizer = converter.converted()
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"{PATTERN} cannot be used: {error}", fix=FETCH) from error
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    return tokenizer


def check_equal(tokenizer: Tokenizer, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> None:
    """Raises an error unless a tokenizer equals tiktoken on every token and on random sequences of tokens.

    Args:
        tokenizer: The tokenizer.
        ranks: The number of each token's bytes.
        pattern: Regular expression for words.
        special: Number of each token beyond the vocabulary.

    Raises:
        UserError: A text gets other tokens, or does not come back from its tokens; names the first such text.
    """
    from tiktoken import Encoding

    reference = Encoding("model", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special))
    texts = [*probes(ranks), "".join(special)]
    results = tokenizer.encode_batch(texts, add_special_tokens=False)
    all_expected = reference.encode_batch(texts, allowed_special="all")
    for text, result, expected in zip(texts, results, all_expected, strict=True):
        if result.ids != expected:
            differs = f"{shown(text)} has the tokens {result.ids[:8]} instead of {expected[:8]}"
        elif tokenizer.decode(expected, skip_special_tokens=False) != text:
            differs = f"{shown(text)} does not come back"
        else:
            continue
        raise UserError(f"transformers converts {TIKTOKEN} to another tokenizer: {differs}", fix=FETCH)


def probes(ranks: Mapping[bytes, int]) -> Iterator[str]:
    """Yields the texts on which both tokenizers are compared: `ALWAYS` and `KNOWN`, every token that is text, runs of a
    character, and `JOINED` random sequences of 8 tokens, the same in every call."""
    yield from (*ALWAYS, *KNOWN)
    words: Sequence[str] = [token.decode() for token in ranks if _is_text(token)]
    yield from words
    yield from (letter * count for letter in "a0 .-=\n" for count in range(2, 40))
    random = Random(0)
    yield from ("".join(random.choices(words, k=8)) for _ in range(JOINED))


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Parses the command line, writes tokenizer.json, prints its path, and returns the exit code 0. Errors are raised,
    as by `write`; `guarded` turns them into exit codes.

    Args:
        arguments: The words after the program's name.

    Raises:
        UserError: The command line is wrong, or `write` refuses the directory.
        OSError: tokenizer.json cannot be written.
    """
    about = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="python -m skyrl_mega.hf_checkpoint.tokenizer_json", description=about, allow_abbrev=False)
    parser.add_argument("model", type=path_of, metavar="DIR", help=f"a model's directory with {TIKTOKEN}")
    print(write(parser.parse_args(arguments).model))
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
