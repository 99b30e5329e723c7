"""Each statement of docs/security.md: what a network neighbour and files of others can do, and what they cannot."""

from __future__ import annotations

import ast
import json
import re
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import datasets
import psutil
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import zero_to_fp32
from torch.serialization import safe_globals

from ds_dynmo.cli.run_records import read_report
from ds_dynmo.cli.training.resuming import read_run_metadata
from ds_dynmo.config import DynMoConfig, KubernetesConfig, RepackConfig, parse_section
from ds_dynmo.data import DataConfig, open_data
from ds_dynmo.engine.comm.objects import from_bytes, to_bytes
from ds_dynmo.engine.resize.release.command import Command
from ds_dynmo.engine.resize.release.kubernetes import Kubernetes
from ds_dynmo.engine.save.manifest import MANIFEST, StageManifest, stage_file
from ds_dynmo.engine.save.safe_load import check_file, describe, safe_load
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import exporting, huggingface
from ds_dynmo.partitioners.registry import get
from tests.support.checkpoints import Evil
from tests.support.pages import ROOT
from tests.support.sources import nodes_of
from tests.support.words import WORDS, word_tokenizer

PACKAGE = ROOT / "ds_dynmo"
PAGE = (ROOT / "docs" / "security.md").read_text()
TESTED: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., None])


def plain(text: str) -> str:
    return " ".join(text.split())


def statements() -> set[str]:
    """Return the page's statements: rows of its table as "who: yes", items of its lists as "heading: item"."""
    rows = re.findall(r"^\| (?!who|---)(.+) \| (yes|no) \|$", PAGE, re.MULTILINE)
    found = {f"{who}: {answer}" for who, answer in rows}
    for section in PAGE.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        found |= {f"{heading}: {plain(item)}" for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]}
    return found


def holds(*beginnings: str) -> Callable[[Test], Test]:
    """Note which statements a test holds, by how they begin."""

    def note(test: Test) -> Test:
        for beginning in beginnings:
            (statement,) = [found for found in statements() if found.startswith(beginning)]
            TESTED.add(statement)
        return test

    return note


def test_every_statement_has_a_test() -> None:
    assert len(statements()) > 20 and statements() == TESTED


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Write a file of torch's that makes a folder beside it when it is unpickled."""
    path = tmp_path / "file.pt"
    torch.save({"evil": Evil(str(tmp_path))}, path)
    return path


def ran(file: Path) -> bool:
    return (file.parent / "evil").exists()


def script(path: Path) -> Path:
    """Write a Python file that makes a folder beside it when it is run."""
    path.write_text("import os\nos.mkdir(os.path.join(os.path.dirname(__file__), 'evil'))\n")
    return path


# -- a neighbour in the network -----------------------------------------------------------------------


@holds("a neighbour who reaches the ports of a launch: yes", "A neighbour in the network: Can run code as you")
def test_what_ranks_exchange_is_unpickled(tmp_path: Path) -> None:
    from_bytes(to_bytes(Evil(str(tmp_path))), torch.device("cpu"))
    assert (tmp_path / "evil").exists()


@holds(
    "A neighbour in the network: Can read, overwrite and delete the keys",
    "A neighbour in the network: Reaches that store by every address",
)
def test_the_store_of_a_launch_is_open() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("secret", "theirs")
    stranger = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    assert stranger.get("secret") == b"theirs"
    stranger.set("secret", "another's")
    assert store.get("secret") == b"another's"
    assert stranger.delete_key("secret") and not store.check(["secret"])
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == store.port} <= {"::", "0.0.0.0"}


@holds("A neighbour in the network: Finds no port of ds_dynmo's own")
def test_the_package_opens_no_port() -> None:
    opening = {"listen", "create_server", "start_server", "TCPStore", "HTTPServer", "TCPServer"}
    assert not [(path, call) for path, call, _ in calls() if call.rpartition(".")[2] in opening]


# -- a configuration ----------------------------------------------------------------------------------

RUNS = re.compile(
    r"(pickle|marshal|torch|dill|cloudpickle|numpy|np)\.loads?|(pickle\.)?Unpickler|_Unpickler|eval|exec|compile"
    r"|__import__|(importlib\.)?import_module|runpy\..*|subprocess\..*|os\.(system|popen|exec.*|spawn.*|posix_spawn)"
)
PLACES = {
    # names in the source
    ("__init__.py", "import_module"),
    ("models/__init__.py", "import_module"),
    ("models/huggingface/configs.py", "importlib.import_module"),
    ("engine/deepspeed/probe.py", "importlib.import_module"),
    ("engine/deepspeed/shm_operator.py", "importlib.import_module"),
    ("torch_private.py", "import_module"),
    # of other ranks
    ("engine/comm/objects.py", "pickle.loads"),
    ("engine/move/arriving.py", "pickle.loads"),
    ("engine/move/migrator.py", "pickle.loads"),
    ("engine/move/pickling.py", "_Unpickler"),
    ("engine/save/writing.py", "pickle.loads"),
    # of files: with weights_only
    ("engine/save/safe_load.py", "torch.load"),
    ("models/exporting.py", "torch.load"),
    # of the configuration
    ("partitioners/registry.py", "import_module"),
    ("engine/resize/release/command.py", "subprocess.run"),
}


def dotted(function: ast.expr) -> str:
    """Write a function as it is called: "torch.load", or the last names only, ".load", of what a call returns."""
    if isinstance(function, ast.Name):
        return function.id
    return f"{dotted(function.value)}.{function.attr}" if isinstance(function, ast.Attribute) else ""


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """List the calls in the package: the file, the function as it is written, and the call."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        found += [(str(path.relative_to(PACKAGE)), dotted(node.func), node) for node in nodes]
    return found


@holds("A configuration: Cannot make ds_dynmo import, unpickle or start anything else")
def test_the_package_imports_unpickles_and_starts_nothing_else() -> None:
    """A new place belongs into this list, and onto the page if something that is not ours reaches it."""
    assert {(path, call) for path, call, _ in calls() if RUNS.fullmatch(call)} == PLACES


@holds("a configuration: yes", "A configuration: Can import a module and call a function")
def test_a_balancer_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_balancer", raising=False)
    script(tmp_path / "their_balancer.py")
    with pytest.raises(ConfigError, match='has no function "balance"'):
        get("their_balancer:balance")
    assert (tmp_path / "evil").exists()
    del sys.modules["their_balancer"]


@holds("A configuration: Can run a program when ranks are released")
def test_a_program_is_run_without_a_shell(tmp_path: Path) -> None:
    config = parse_section(RepackConfig, {"release": "command", "command": ["mkdir", f"{tmp_path}/a;b $(c)"]}, "repack")
    assert config.command is not None
    Command(config.command, 10.0).release([], [])
    assert [path.name for path in tmp_path.iterdir()] == ["a;b $(c)"]


@holds("A configuration: Can name any other file that you may write")
def test_files_are_named_freely(tmp_path: Path) -> None:
    path = str(tmp_path / "anywhere")
    config = parse_section(DynMoConfig, {"report": path, "trace": {"path": path, "steps": [1, 2]}}, "dynmo")
    assert config.report == path and config.trace is not None and config.trace.path == path


@holds("A configuration: Cannot change pods of Kubernetes")
def test_pods_are_not_changed_by_default(tmp_path: Path) -> None:
    assert KubernetesConfig().dry_run
    assert Kubernetes(KubernetesConfig(), 10.0, tmp_path)._options()["dry_run"] == "All"


# -- a checkpoint -------------------------------------------------------------------------------------


@holds('a checkpoint, loaded with a `"dynmo"` section: no', "A checkpoint: Cannot run code where the engine has")
def test_a_checkpoint_runs_no_code(evil: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds what could run code"):
        safe_load(str(evil))
    assert not ran(evil)
    loads = [node for _, call, node in calls() if call == "torch.load"]
    assert loads and all("weights_only=True" in ast.unparse(node) for node in loads)


class Theirs:
    """A class of the user's."""


@holds("A checkpoint: Can hold a class of yours")
def test_the_user_allows_classes(tmp_path: Path) -> None:
    torch.save(Theirs(), tmp_path / "file.pt")
    line = r"from tests.source.test_security_page import Theirs; torch.serialization.add_safe_globals\(\[Theirs\]\)"
    with pytest.raises(CheckpointError, match=line):
        safe_load(str(tmp_path / "file.pt"))
    with safe_globals([Theirs]):
        assert isinstance(safe_load(str(tmp_path / "file.pt")), Theirs)


@holds("A checkpoint: Cannot run code in `ds-dynmo-train --resume` and `ds-dynmo-export`")
def test_our_commands_run_no_code_of_a_checkpoint(evil: Path) -> None:
    folder = evil.parent / "step"
    (folder / MANIFEST).parent.mkdir(parents=True)
    (folder / MANIFEST).touch()
    evil.rename(folder / stage_file(0))
    with pytest.raises(ConfigError, match="it holds what could run code"):
        read_run_metadata(evil.parent, "step")
    with pytest.raises(CheckpointError, match="cannot be read"):
        exporting.load(folder / stage_file(0))
    assert not ran(evil)


@holds(
    "a checkpoint, loaded without that section or given to DeepSpeed's converters: yes",
    'A checkpoint: Can run code where the engine has no `"dynmo"` section',
)
@pytest.mark.parametrize(
    "load",
    [TorchCheckpointEngine().load, lambda path: zero_to_fp32.parse_model_states([path])],
    ids=["load", "convert"],
)
def test_deepspeed_unpickles_a_checkpoint(evil: Path, load: Callable[[str], Any]) -> None:
    try:
        load(str(evil))
    except ValueError as error:
        assert "is not a model state checkpoint" in str(error)
    assert ran(evil)


@holds("A checkpoint: Cannot name a file outside its folder")
@pytest.mark.parametrize("path", ["../file.pt", "dynmo/../../file.pt", "/tmp/file.pt"])
def test_a_manifest_names_no_file_outside_of_its_folder(path: str) -> None:
    manifest = {"slices": [], "files": {"dynmo/file.pt": {"num_bytes": 1, "fingerprint": ""}}}
    assert StageManifest.from_json(json.dumps(manifest)).files
    manifest["files"] = {path: {"num_bytes": 1, "fingerprint": ""}}
    with pytest.raises(ValueError, match=re.escape(path)):
        StageManifest.from_json(json.dumps(manifest))


@holds("A checkpoint: Can have any weights")
def test_a_file_that_was_replaced_with_its_checksums_is_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    torch.save({"weight": torch.zeros(2)}, path)
    before = describe(path)
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="is not the file that was written"):
        check_file(path, before)
    assert torch.equal(safe_load(check_file(path, describe(path)))["weight"], torch.ones(2))


# -- a report -----------------------------------------------------------------------------------------


@holds("a report: no", "A report: Cannot run code in `ds-dynmo-plot`")
def test_a_report_is_read_as_json(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text('{"kind": "step", "step": 1, "path": "/etc/passwd", "__reduce__": ["os.mkdir", ["evil"]]}\n')
    (record,) = read_report(path).steps
    assert record["path"] == "/etc/passwd"
    path.write_text("__import__('os').mkdir('evil')\n")
    with pytest.raises(ConfigError, match="line 1 is no record"):
        read_report(path)
    readers = [PACKAGE / "cli" / "run_records.py", *(PACKAGE / "plan").glob("*.py")]
    assert not [path for path in readers if re.search(r"open\(|Path\(", path.read_text())]


# -- rows of data -------------------------------------------------------------------------------------


@holds("rows of data: no", "Rows of data: Cannot run code")
@pytest.mark.parametrize("kind", ["text", "lines", "parquet", "saved"])
def test_rows_run_no_code(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "rows"
    rows = datasets.Dataset.from_dict({"text": ["one two three"] * 4})
    folder.mkdir()
    if kind == "text":
        (folder / "a.txt").write_text("one two three\n" * 4)
    elif kind == "lines":
        (folder / "a.jsonl").write_text('{"text": "one two three"}\n' * 4)
    elif kind == "parquet":
        rows.to_parquet(folder / "a.parquet")
    else:
        rows.save_to_disk(folder)
    for name in ("rows.py", "dataset.py", "__init__.py"):
        if kind == "saved":  # beside others, a file of another kind is refused
            script(folder / name)
        else:
            script(tmp_path / name)
    tokenizer = word_tokenizer(tmp_path / "model")
    config = DataConfig(cache=str(tmp_path / "cache"))
    assert open_data(folder, config, vocabulary=len(WORDS), tokenizer=tokenizer) is not None
    assert not [*tmp_path.rglob("evil")]


# -- a Hugging Face folder ----------------------------------------------------------------------------


TEMPLATE = "{% generation %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endgeneration %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a small llama whose configs name code of the folder, and that code."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=8, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    word_tokenizer(tmp_path, template=TEMPLATE)
    code = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    change(tmp_path / "config.json", auto_map=code, attn_implementation="someone/attention")
    script(tmp_path / "theirs.py")
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def opened(folder: Path, row: dict[str, Any]) -> Any:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    return open_data(rows, DataConfig(cache=str(folder / "cache")), vocabulary=len(WORDS), tokenizer=folder)


@holds("a Hugging Face folder: no", "A Hugging Face folder: Cannot run code in a model or a tokenizer")
def test_a_folder_runs_no_code(folder: Path) -> None:
    assert huggingface.layers(folder, verified=False)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["theirs.Slow", "theirs.Fast"]})
    with pytest.raises(ConfigError, match="contains custom code which must be executed"):
        opened(folder, {"text": "one two three"})
    assert not ran(folder / "theirs.py")


@holds("A Hugging Face folder: Cannot reach Python's objects by its chat template")
def test_a_chat_template_runs_in_a_sandbox(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attribute '__class__' of 'str' object is unsafe"):
        opened(folder, {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]})


@holds("A Hugging Face folder: Cannot bring pickles")
def test_pickled_weights_are_not_read(folder: Path, evil: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    evil.rename(folder / "pytorch_model.bin")
    assert huggingface.layers(folder, verified=False) and weights
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="files of pickle are not read"):
        huggingface.layers(folder, verified=False)
    assert not ran(evil)


@holds("A Hugging Face folder: Cannot have anything fetched")
def test_nothing_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", None)
    with pytest.raises(ConfigError, match=r"openai/gpt: there is no such folder or file \(models are not fetched\)"):
        huggingface.layers("openai/gpt")
    assert huggingface.layers(folder, verified=False)  # whose config.json names a repository
    with pytest.raises(ConfigError, match="someone/attention: names code to be fetched, which is never run"):
        huggingface.layers(folder, verified=False, attn_implementation="someone/attention")
