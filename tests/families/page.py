"""The table of docs/models.md, from the refusals of the code and from the models of the sweeps.

`python -m tests.families.page --write` brings the page up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint.index import DTYPES
from skyrl_mega.models.config_json import Hf
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import ARCHITECTURES, architecture
from skyrl_mega.models.routes import RouteShape
from tests.architecture.source import ROOT
from tests.families.layouts import EXPORTED, LAYOUTS, sizes_of
from tests.families.models import COMMON, MODELS

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table -->", "<!-- end of the table -->"
QUANTISED = {
    "block FP8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "MXFP4": {"quant_method": "mxfp4"},
}
"""Quantisation of a checkpoint → `quantization_config`."""
POLICY_LAYOUT = "TP2·EP2"
"""The policy's layout in the engine sweep."""
COLUMNS = ("model", "load", "layouts", "engine", "sync", "export", "replay", "FP8", "residency")


def hf_of(name: str) -> dict[str, Any]:
    """Returns the config.json of a tiny model."""
    import transformers

    tiny = MODELS[name]
    config: dict[str, Any] = getattr(transformers, tiny.config)(**COMMON | tiny.sizes).to_dict()
    return config | tiny.hub


def accepts(check: Callable[[], object]) -> bool:
    """Returns False if `check` raises a UserError."""
    try:
        check()
    except UserError:
        return False
    return True


def table(configs: dict[str, Hf]) -> str:
    """Returns the table, a row per entry of `MODELS`, given the config.json of each, and then dense families."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    rows += [
        (f"`{name}`" if "," not in name else "`{}`, {}".format(*name.split(", ")), *cells(name, hf))
        for name, hf in configs.items()
    ]
    swept = {str(hf["model_type"]) for hf in configs.values()}
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    others = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES) if name not in swept)
    return "\n".join([*lines, "", f"Families outside the sweeps, with tests of their own: {others}."])


def cells(name: str, hf: Hf) -> tuple[str, ...]:
    """Returns the cells of a model's row, without its name."""
    arch = architecture(hf)
    decoder = arch.describe(hf)
    packed = [
        kind
        for kind, of in QUANTISED.items()
        if accepts(lambda of=of: arch.describe({**hf, "quantization_config": of}))
    ]
    layouts = [
        which for which in LAYOUTS if accepts(lambda which=which: arch.check_layout(hf, sizes_of(name, which)[1]))
    ]
    engine = {"TP1": (1, False), "TP2": (2, False), "EP2": (2, True)}
    sizes = [size for size, of in engine.items() if accepts(lambda of=of: arch.check_engine(hf, *of))]
    float32 = sorted({tensor.rpartition(".")[2] for tensor in getattr(decoder, "float32_tensors", ())})
    synced = "yes" if not float32 else f"yes; float32 {', '.join(float32)}"
    return (
        ", ".join([*DTYPES, *packed]),
        "all" if len(layouts) == len(LAYOUTS) else ", ".join(layouts),
        ", ".join(sizes),
        synced if "TP1" in sizes and POLICY_LAYOUT in layouts else "no",
        "yes" if EXPORTED in layouts else "no",
        "yes" if RouteShape.of(decoder) else "no experts",
        "yes" if accepts(lambda: check_fp8(decoder)) else "refused",
        "yes" if "TP1" in sizes else "no",
    )


def check_fp8(decoder: Decoder) -> None:
    """Raises UserError if a block refuses FP8."""
    for block in decoder.parts:
        block.check_fp8("policy.precision.recipe")


def renewed(text: str, configs: dict[str, Hf]) -> str:
    """Returns the page with a new table."""
    before, rest = text.split(START)
    return f"{before}{START}\n\n{table(configs)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Prints the table, or writes the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="bring docs/models.md up to date")
    configs = {name: hf_of(name) for name in MODELS}
    if parser.parse_args().write:
        PAGE.write_text(renewed(PAGE.read_text(), configs))
    else:
        print(table(configs))


if __name__ == "__main__":
    main()
