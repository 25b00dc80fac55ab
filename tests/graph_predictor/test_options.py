"""Options over all commands: one name, one meaning; devices and clusters of one's own wherever a name is taken."""

from __future__ import annotations

import ast
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer.main
from report_support import own_program
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.edits.registry import OPTIONS
from kernel_models.collectives import CommError, CommProfile, find_topology
from kernel_models.collectives.topology import FOLDER as TOPOLOGIES
from kernel_models.device import DeviceError, find_device, shape_device
from step_views.cli.options import SHARED
from tracer.shape_only.devices import FOLDER, TracedDevice, device_names

ROOT = Path(__file__).resolve().parents[2]
CAPTURE = str(ROOT / "traces" / "cpu-small")
AXES = "sweep"
"""The command whose options of these names take several values, separated by commas."""
COMPARED = {("plan", f"--{name}") for name in (
    "gpus", "device", "topology", "price", "clock", "bandwidth", "memory", "link")} | {
    ("comm study", "--gpus"), ("comm study", "--preset"), ("price-layer", "--device"), ("price-layer", "--batch")}
"""Options of other commands that do, where other commands take one value."""
PRIVATE = {"--help"}


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


@cache
def _options() -> dict[str, list[tuple[str, Any]]]:
    """Every long option with the commands that have it."""
    found: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name, command in _commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                for option in parameter.opts:
                    found[option].append((name, parameter))
    return found


def _kind(parameter: Any) -> type:
    """What one value of an option is."""
    kind = parameter.type_descriptor.annotation
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _is_axis(command: str, parameter: Any) -> bool:
    if not str(parameter.metavar).endswith(",…"):
        return False
    return (command, parameter.opts[0]) in COMPARED or (command == AXES and (
        parameter.opts[0] in SHARED or parameter.opts[0][2:] in {option.name for option in OPTIONS}))


def test_an_option_means_the_same_in_every_command() -> None:
    # How many steps to record; for 'fit', the table of those that were measured. A factor; for 'calibrate', a switch.
    # CUDA graphs are an edit of a recorded step and what a server decodes with anyway. A survey keeps tags, its 'show'
    # chooses by them, and its workers may be a number of processes.
    others = {("fit", "--steps"), ("calibrate", "--host"), ("serve", "--cuda-graphs"), ("survey run", "--workers"),
              ("survey show", "--tag")}
    for option, everywhere in _options().items():
        users = [user for user in everywhere if (user[0], option) not in others]
        single = [(command, parameter) for command, parameter in users if not _is_axis(command, parameter)]
        assert len({_kind(parameter) for _, parameter in single}) <= 1, users
        assert len({parameter.metavar for _, parameter in single}) <= 1, users
        assert len({tuple(parameter.opts) for _, parameter in users}) == 1, users
        if option in SHARED:
            value, stem = SHARED[option]
            for command, parameter in users:
                assert parameter.help.startswith(stem), command
                assert parameter.metavar in (value or None, f"{value},…"), command
        elif not option.startswith("-o"):
            assert len({parameter.help for _, parameter in single}) <= 1, users


def test_every_shared_option_is_used_and_no_other_name_of_it_is_left() -> None:
    found = _options()
    assert set(SHARED) <= set(found)
    assert not {"--host-us", "--unprofiled"} & set(found)
    assert {command for command, _ in found["--output"]} == {"serve"}  # tokens of answers
    assert all({"-o", "--out"} == set(parameter.opts) for _, parameter in found["--out"])
    windows, regions, cycles = ({command for command, _ in found[name]} for name in (
        "--window", "--step-region", "--cycle"))
    assert len(windows) > 10 and windows <= regions & cycles


def own(folder: Path, *, device: tuple[str, str] = ("", ""), node: tuple[str, str] = ("", "")) -> tuple[Path, Path]:
    """A device and a node of one's own, with some of their text changed."""
    text = (FOLDER / "h200-sxm.toml").read_text(encoding="utf-8")
    text = text.replace('name = "h200-sxm"', 'name = "my-gpu"').replace("value = 4800", "value = 9600")
    (folder / "mine.toml").write_text(text.replace(*device))
    text = (TOPOLOGIES / "dgx-h200.toml").read_text(encoding="utf-8")
    text = text.replace('name = "dgx-h200"', 'name = "my-node"').replace('"h200-sxm"', '"mine.toml"') + """
[networks.my-net]
title = "mine"
rail = true
card_gbps = { value = 99, source = "node" }
payload_share = { value = 1, source = "node" }
extra_latency_us = { value = 0, source = "node" }
oversubscription = { value = 1, source = "node" }
"""
    (folder / "node.toml").write_text(text.replace(*node))
    return folder / "mine.toml", folder / "node.toml"


def run(*arguments: object) -> Any:
    said = CliRunner().invoke(app, [str(each) for each in arguments])
    assert "Traceback" not in said.output and said.exit_code in (0, 1, 2), said.output
    return said


def test_a_device_of_ones_own_is_priced_and_traced_for(tmp_path: Path) -> None:
    own_device, _ = own(tmp_path)
    spec = find_device(str(own_device))
    assert (spec.name, spec.memory_bandwidth_gbps) == ("my-gpu", 9600)
    assert shape_device(spec) == TracedDevice("my-gpu", (9, 0), "nvidia", "NVIDIA H200", 150_750_000_000, 132)
    assert shape_device(find_device("h200")) == replace(shape_device(spec), name="h200-sxm")
    times = [json.loads(run("price", "aten::add", "--shapes", "8192x8192,8192x8192", "--device", name, "--json").stdout)
             ["time_us"] for name in (own_device, "h200-sxm")]
    assert times[0] < 0.6 * times[1]
    assert shape_device(find_device("10940X")) == TracedDevice(
        "i9-10940x", (0, 0), "host", "Intel(R) Core(TM) i9-10940X CPU @ 3.30GHz", 256_000_000_000, 14)
    shown = run("devices", own_device).stdout
    assert "my-gpu" in shown and "9600" in shown


@pytest.mark.parametrize("command", ["predict", "sweep"])
def test_predictions_take_a_device_of_ones_own(command: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    more = [] if command == "predict" else ["-o", tmp_path / "t.csv", "--jobs", 1]
    said = run(command, own_program(tmp_path), "--device", own(tmp_path)[0], *more, "--json")
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert (found["device"] if command == "predict" else found["rows"][0]["device"]) in (
        "my-gpu", str(tmp_path / "mine.toml"))


def test_a_step_is_traced_for_a_processor_and_computes_on_its_cores(tmp_path: Path) -> None:
    """By name of the step's device or of another, as for "cpu": no kernels, only host time."""
    pytest.importorskip("torch")
    source, file = own_program(tmp_path, 4096, cuda=False), tmp_path / "step.foretrace"
    processor = ("--device", "i9-10940x")
    assert run("trace", source, *processor, "-o", file).exit_code == 0
    found = {}
    for name, arguments in (("script", [source, *processor]), ("file", [file]),
                            ("larger", [source, *processor, "--set", "batch=512"]), ("cpu", [file, "--device", "cpu"])):
        found[name] = json.loads(run("predict", *arguments, "--json").stdout)
        assert found[name]["gpu_active_us"] == 0 and found[name]["bound"] == "host"
    assert found["script"]["device"] == found["file"]["device"] == "i9-10940x"
    step = {name: each["step_time_us"] for name, each in found.items()}
    assert step["script"] == step["file"] < step["larger"]
    assert step["cpu"] > 2 * step["file"]


@pytest.mark.parametrize(("old", "new", "says"), [
    ("[memory]", "[memery]", r"lacks the table \[memory\]"), ("value = 9600", "value = -1", "-1"),
    ("value = 9600", 'value = "fast"', "fast"), ("value = 9600", "value = nan", "nan"),
    ("value = 9600", "value = 0", "bandwidth_gbps is 0; expected is a number from 10 "),
    ('name = "my-gpu"', "name = 7", "name is 7; expected is a text"),
    ('name = "my-gpu"', 'name = "a b"', "expected are a-z"), ("[compute]", "[compute", "is no TOML"),
    ('name = "my-gpu"', 'name = "h200-sxm"', "the name of a known one"), ("fp32 = {", "fp31 = {", "fp32"),
    ('source = "paper"', 'source = "none"', 'the source "none", which')])
def test_a_device_that_is_not_complete_is_told(old: str, new: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=says) as error:
        find_device(str(own(tmp_path, device=(old, new))[0]))
    assert "\n" not in str(error.value)


def test_what_is_no_file_of_a_device_or_node_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="does not exist; check the path"):
        find_device(str(tmp_path / "absent.toml"))
    with pytest.raises(CommError, match="does not exist; check the path"):
        find_topology(str(tmp_path / "absent.tomlx2"))
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(DeviceError, match="pipe"):
        find_device(str(tmp_path / "pipe.toml"))


def test_a_cluster_of_ones_own_is_predicted_and_kept_in_profiles(tmp_path: Path) -> None:
    _, own_node = own(tmp_path)
    where = find_topology(f"{own_node}x4@my-net")
    assert (where.nodes, where.gpus, where.network.card_gbps) == (4, 32, 99)
    assert find_device(where.node.device).name == "my-gpu"
    said = run("comm", "predict", "all_reduce", "--bytes", "64MiB", "--topology", f"{own_node}x4", "--json")
    assert json.loads(said.stdout)["topology"] == "my-nodex4"
    own_node.unlink()
    kept = tmp_path / "comm.json"
    for known in (where, find_topology("dgx-h200x4@roce-100")):
        CommProfile(known).save(kept)
        assert CommProfile.load(kept).topology == known
    assert json.loads(kept.read_text())["topology"] == "dgx-h200x4@roce-100"


@pytest.mark.parametrize(("old", "new", "says"), [
    ('link = "nvswitch"', 'link = "string"', "link"),
    ("gpus = { value = 8", "gpus = { value = 8.5", "gpus is 8.5; expected is a whole number"),
    ("rail = true", 'rail = "no"', 'rail is "no"; expected is true or false'),
    ('architecture = "hopper"', 'architecture = "hoper"', "known of this vendor; expected is one of .*hopper"),
    ("gpus = { value = 8", "gpus = { value = 0", "gpus is 0; expected is a whole number from 1"),
    ("[figures]", "[figure]", r"lacks the table \[figures\]"), ('name = "my-node"', 'name = "dgx-h200"', "known one"),
    ("card_gbps = { value = 99", "card_gbps = { value = 0", "card_gbps is 0; expected"),
    ("rail = true", "", "lacks my-net.rail")])
def test_a_node_that_is_not_complete_is_told(old: str, new: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(CommError, match=says):
        find_topology(str(own(tmp_path, node=(old, new))[1]))


def test_devices_and_topologies_are_listed_with_their_sources() -> None:
    listed, said = json.loads(run("devices", "--json").stdout), run("devices").stdout
    assert {each["name"] for each in listed} == {path.stem for path in FOLDER.glob("*.toml")}
    assert all(f"\n{name} " in said for name in device_names())  # entire
    assert "data sheet" in plain(run("devices", "b200").stdout)
    assert run("devices", "h200-sxm", "--toml").stdout == (FOLDER / "h200-sxm.toml").read_text(encoding="utf-8")
    assert {each["name"] for each in json.loads(run("topologies", "--json").stdout)["nodes"]} >= {"dgx-h200", "cpu"}
    assert "InfiniBand NDR" in plain(run("topologies", "dgx-h200x8").stdout)
    assert run("devices", "gpu9000").exit_code == 2 and run("devices", "--toml").exit_code == 2


@pytest.mark.parametrize(("words", "expected"), [
    ("foretrace dev", "devices"), ("foretrace replay --time", "--timeline"), ("foretrace comm pre", "predict"),
    ("foretrace predict x --device b2", "b200"), ("foretrace topologies dgx-h2", "dgx-h200"),
    ("foretrace capture --workload lla", "llama")])
def test_a_shell_completes_commands_and_options(words: str, expected: str) -> None:
    ran = CliRunner().invoke(app, prog_name="foretrace", env={
        "_FORETRACE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)})
    assert expected in ran.stdout.split(), ran.output


def test_a_recorded_step_goes_by_name_or_number() -> None:
    times = [json.loads(run("predict", CAPTURE, "--step", step, "--json").stdout)["steps"] for step in ("0", "-1")]
    assert times[0] != times[1]
    assert json.loads(run("predict", CAPTURE, "--step", times[0][0], "--json").stdout)["steps"] == times[0]


@pytest.mark.parametrize(("arguments", "says"), [
    (["predict", CAPTURE, "--step", "ProfilerStep#999"], "There is no step"),
    (["calibrate", "-o", "x.profile", "--seed", "-1"], "--seed"),
    (["ranks", CAPTURE, "--set", "batch=64"], "--code is an option of foretrace predict.")])
def test_a_refusal_names_the_option(arguments: list[str], says: str, tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = run(*arguments)
    assert said.exit_code == 2
    assert says in plain(said.output)
    assert not list(tmp_path.iterdir())


def test_what_traces_a_script_takes_the_share_that_masks_select() -> None:
    without = [name for name, command in _commands(typer.main.get_command(app))
               if any("--code" in one.opts or "SCRIPT.py:FUNCTION" in (getattr(one, "help", None) or "")
                      for one in command.params)
               and not any("--selected" in one.opts for one in command.params)]
    assert without == []


def test_refusals_name_options_that_are_there() -> None:
    # Files whose refusals name options of nsys, rocprof, nccl-tests, Megatron and pytest.
    of_others = {"nsys.py", "rocprof.py", "text_logs.py", "parallel_plan.py", "step_limits.py"}

    def unknown(text: str) -> set[str]:
        return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - set(_options())

    for room in ("tracer", "kernel_models", "graph_predictor", "step_views", "planner"):
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text()
            # Most files name no other option at all and need not be parsed.
            tree = ast.walk(ast.parse(source)) if unknown(source) and path.name not in of_others else ()
            for raised in (node for node in tree if isinstance(node, ast.Raise) and node.exc is not None):
                text = "".join(one.value for one in ast.walk(raised.exc)
                               if isinstance(one, ast.Constant) and isinstance(one.value, str))
                assert not unknown(text), path
