#!/usr/bin/env python3
"""Make a small Llama with random weights and a tokenizer of its own, and text to train it on. Needs no network.

    python scripts/tiny_model.py model text.jsonl

The text is Python's standard library: a JSON line for each function and method of its modules. The tokenizer is a
byte-level BPE, trained on that text. The folder is what transformers' ``save_pretrained`` writes.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"


def functions() -> Iterator[str]:
    """Iterate over the sources of functions and methods of the standard library's modules, in the order of names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines(keepends=True)
        module = ast.parse(source).body
        classes = [node for node in module if isinstance(node, ast.ClassDef)]
        for node in chain(module, *(each.body for each in classes)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def make_model(args: argparse.Namespace, end: int) -> LlamaForCausalLM:
    """Build the model with random weights."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.positions,
        bos_token_id=end,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the model and its tokenizer")
    parser.add_argument("text", type=Path, help="JSON lines to write")
    parser.add_argument("--documents", type=int, metavar="N", help="write the first N only (default: all)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    texts = list(islice(functions(), args.documents))
    args.text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = make_tokenizer(texts, args.vocab_size)
    tokenizer.save_pretrained(args.folder)
    model = make_model(args, tokenizer.eos_token_id)
    model.save_pretrained(args.folder)
    print(f"{args.text}: {len(texts):,} documents; {args.folder}: {model.num_parameters():,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
