"""--config FILE: options in a file, and the options of an earlier run."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from outputs import lines, newest, weights_and_momentum

import main
from config import Config
from ddp.core.errors import UsageError
from processes import train

TEMPLATE = Path(main.__file__).parent
needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")


def parse(path: Path, *words: str) -> Config:
    return Config.parse(["--config", str(path), *words])


@needs_tomllib
def test_a_toml_file_holds_options_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'dataset = "synthetic"\nlr = 0.1\nbatch-size = 32\nwarmup_epochs = 0\n'
        'channels-last = true\ncompile = false\ndata-dir = "a b"\n'
    )
    config = parse(tmp_path / "a.toml", "--lr", "0.2", "--epochs=3")
    assert (config.dataset, config.lr, config.batch_size, config.warmup_epochs) == ("synthetic", 0.2, 32, 0)
    assert (config.channels_last, config.compile, config.data_dir, config.epochs) == (True, False, "a b", 3)
    assert config.given == {"dataset", "lr", "batch_size", "warmup_epochs", "channels_last", "data_dir", "epochs"}
    before = Config.parse(["--lr", "0.2", "--config", str(tmp_path / "a.toml")])
    assert before.lr == 0.2, "the command line wins, wherever the file is named"


@pytest.mark.slow
def test_the_config_json_of_a_run_repeats_it(tmp_path: Path, small: None) -> None:
    """As two processes that were started by hand: their ranks are not options of the next run."""
    options = ("--dataset", "synthetic", "--device", "cpu", "--seed", 3, "--lr", 0.1, "--epochs", 1, "--batch-size", 16)
    train(2, *options, "--deterministic", "--output-dir", tmp_path / "A")
    path = tmp_path / "A/config.json"
    record = json.loads(path.read_text())
    record["options"] |= {"rank": 0, "world_size": 2, "local_rank": 0, "init_method": "file:///gone"}
    record["options"]["comm_hook"] = "none"  # as an earlier version has written it
    path.write_text(json.dumps(record))
    train(2, "--config", path, "--output-dir", tmp_path / "B")
    assert weights_and_momentum(newest(tmp_path / "A")) == weights_and_momentum(newest(tmp_path / "B"))
    assert lines(tmp_path / "A", "val") == lines(tmp_path / "B", "val")
    one, two = (json.loads((tmp_path / each / "config.json").read_text())["options"] for each in "AB")
    assert one.pop("comm_hook") == "none"
    one |= {"rank": None, "world_size": None, "local_rank": None, "init_method": None, "output_dir": two["output_dir"]}
    assert one == two
    assert "already done" in train(2, "--config", tmp_path / "B/config.json"), "in its own directory"


@pytest.mark.slow
def test_launch_node_sh_reads_the_file_too(tmp_path: Path) -> None:
    """Before it starts anything, it refuses what main.py would refuse."""
    (tmp_path / "a.json").write_text('{"dataset": "synthetic", "lr": -1}')
    command = ["bash", TEMPLATE / "launch_node.sh", "--", "--config", tmp_path / "a.json", "--device", "cpu"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: --config {tmp_path}/a.json: --lr: '-1' must be a number > 0; see --help\n"


BAD: dict[str, tuple[str, str]] = {
    "json.json": ("{lr: 1}", "cannot be read as JSON (a TOML file ends with .toml): "),
    "list.json": ('["lr", 1]', "needs names and values of options"),
    "nested.json": ('{"data": {"lr": 1}}', "data must be one value, such as lr = 0.1"),
    "values.json": ('{"lr": [0.1, 0.2]}', "lr must be one value"),
    "unknown.json": ('{"learning-rate": 1}', "unrecognized arguments: --learning-rate=1"),
    "near.json": ('{"epoch": 1}', "unrecognized arguments: --epoch=1 (did you mean --epochs?)"),
    "value.json": ('{"lr": "fast"}', "--lr: 'fast' must be a number > 0"),
    "flag.json": ('{"compile": "yes"}', "--compile: ignored explicit argument 'yes'"),
    "other.json": ('{"config": "b.json"}', "a file cannot name another one"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_one_line(name: str, tmp_path: Path) -> None:
    text, reason = BAD[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as raised:
        parse(tmp_path / name)
    assert str(raised.value).startswith(f"--config {tmp_path / name}: {reason}")
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config .*nowhere.toml: cannot be read as TOML: No such file"):
        parse(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"bytes.json: cannot be read as JSON .*: 'utf-8' codec"):
        parse(tmp_path / "bytes.json")


@needs_tomllib
def test_a_bad_toml_file_is_refused_and_so_is_toml_without_tomllib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("lr 0.1")
    with pytest.raises(UsageError, match=r"a.toml: cannot be read as TOML: "):
        parse(tmp_path / "a.toml")
    original = builtins.__import__

    def without_tomllib(name: str, *rest: Any) -> Any:
        if name == "tomllib":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_tomllib)
    with pytest.raises(UsageError, match=r"a.toml: TOML needs Python 3.11 or newer; write it as JSON"):
        parse(tmp_path / "a.toml")


def test_defaults_remain_where_the_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert asdict(parse(tmp_path / "a.json")) == asdict(Config())
