"""The command `profile`: cases by name, traces on disk, command lines of nsys and ncu, and one-line
refusals.
"""

import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.config import RunConfig
from cs336_systems.device import has_cxx_compiler
from cs336_systems.measure.trace import read_events, trace_of
from cs336_systems.subjects.profiled import ATTENTION_MODES, parse_case, prepare
from tests.command_line import assert_refused, invoke

COVERS = ("cs336_systems/measure",)
CPU = RunConfig(scale="smoke", device="cpu")
SMALL = (
    "small-proxy",
    "--context",
    "32",
    "--batch",
    "1",
    "--steps",
    "1",
    "--warmup",
    "0",
    "--device",
    "cpu",
)


def profiled(folder: Path, *arguments: str) -> tuple[str, Path]:
    """What a profile that ends well prints, and its trace."""
    result = invoke("profile", *arguments, "--results", folder)
    assert result.exit_code == 0, result.output
    (path,) = folder.rglob("*.trace.json.gz")
    return result.stdout, path


# Cases


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("tiny", {}, r"case must be a model size \(small, .*an attention shape BATCHxHEADSxSEQxHEAD_DIM, got 'tiny'"),
        ("small", {"precision": "int8"}, "precision must be one of float32, bfloat16, .*, got 'int8'"),
        ("small", {"attention": "magic"}, "attention must be one of reference, .*, got 'magic'"),
        ("1x1x64x32", {"batch": 4}, "batch, context and attention are options of models, and '1x1x64x32' is an"),
        ("1x1x64x32", {"precision": "bfloat16-autocast"}, "precision of an attention shape must be a dtype, got 'bf"),
        ("small", {"implementation": "triton"}, "implementation of a model must be one of eager, compiled, got 'tri"),
        ("1x1x64x32", {"mode": "train_step"}, "mode of an attention shape must be one of forward, .*, got 'train_s"),
    ],
)  # fmt: skip
def test_cases_that_make_no_sense_are_refused(
    text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(text, **options)


@pytest.mark.parametrize(
    "implementation, mode", [*product(["eager", "compiled"], ATTENTION_MODES), ("flex", "forward")]
)
def test_an_attention_call_runs_in_every_mode(implementation: str, mode: str) -> None:
    """Once a compiled backward ended in an error about its buffers, and FlexAttention's forward
    asked for no leaves.
    """
    if implementation != "eager" and not has_cxx_compiler():
        pytest.skip("no C++ compiler")
    prepared = prepare(parse_case("1x2x64x32"), implementation, mode, CPU)
    for _ in range(2):
        prepared.before()
        result = prepared.call()
    assert len(result) == (1 if mode == "forward" else 3)


# The command


def test_a_model_is_profiled(tmp_path: Path) -> None:
    printed, path = profiled(tmp_path, *SMALL, "--mode", "train_step")
    assert all(
        part in printed for part in ("attention.softmax", "optimizer", "aten::mm", str(path))
    )
    assert path.parent.parts[-2:] == ("logs", "profiles"), "where git does not look"
    assert path.name == "small-proxy-train_step-eager-float32-context32-batch1.trace.json.gz"
    trace = trace_of(read_events(path))
    assert (
        len(trace.step_ms) == 1 and trace.kernel_ms(phase="backward", within="attention.scores") > 0
    )


def test_an_attention_shape_is_profiled_without_what_prepares_it(tmp_path: Path) -> None:
    printed, path = profiled(
        tmp_path, "1x2x512x32", "--mode", "backward", "--device", "cpu", "--steps", "2"
    )
    trace = trace_of(read_events(path))
    assert "2 steps:" in printed and "aten::_softmax_backward_data" in printed
    names = {kernel.name for kernel in trace.in_steps().kernels}
    assert "aten::_softmax_backward_data" in names and "aten::_softmax" not in names


def test_an_out_of_memory_leaves_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    options = ("--model", "tests.broken_models:OutOfMemory", "--no-ranges", "--results", tmp_path)
    result = invoke("profile", *SMALL, *options)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(
        "error: CUDA out of memory. Tried to allocate 64.00 GiB.; the trace up to there is"
    )
    assert len(list(tmp_path.rglob("*.trace.json.gz"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["9999x999x99999x64"], "predicted to need "),
        (["64x64x16777216x128", "--implementation", "triton"], "predicted to need "),
        (["1x1x64x32", "--implementation", "triton", "--precision", "bfloat16"],
         "error: backend 'triton' cannot be used: Triton's CPU interpreter computes wrong bfloat16 products"),
    ],
)  # fmt: skip
def test_what_cannot_run_here_is_one_line(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    assert_refused(
        invoke("profile", *arguments, "--device", "cpu", "--results", tmp_path), message, code=1
    )


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cs336_systems.subjects.profiled.prepare", lambda *_: pytest.fail("it has begun")
    )
    (tmp_path / "file").touch()
    result = invoke("profile", *SMALL, "--device", "cpu", "--results", tmp_path / "file")
    assert_refused(result, "/logs/profiles cannot be written: Not a directory")


# nsys and ncu


def test_the_printed_command_runs_this_case_between_profiler_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "profile",
        "xl",
        "--mode=train_step",
        "--tool",
        "nsys",
        "--print",
        "--results",
        f"{tmp_path}/a b",
    ]
    monkeypatch.setattr(sys, "argv", ["cs336-systems", *given])
    result = invoke(*given)
    assert result.exit_code == 0, result.output
    command = shlex.split(result.stdout)
    assert command[1] == "profile" and f"--output={tmp_path}/a b" in " ".join(command)
    own = command[command.index("-m") + 1 :]
    assert own == ["cs336_systems", *(one for one in given if one != "--print"), "--tool", "api"]
    assert not any(tmp_path.iterdir()), "printing runs nothing"


@pytest.mark.gpu
def test_a_model_is_profiled_on_a_gpu(tmp_path: Path) -> None:
    arguments = (
        "small",
        "--context",
        "128",
        "--batch",
        "1",
        "--mode",
        "train_step",
        "--device",
        "cuda",
    )
    printed, path = profiled(tmp_path, *arguments)
    trace = trace_of(read_events(path))
    assert trace.on_gpu and "attention.softmax" in printed
    assert trace.kernel_ms(category="gemm") > 0 and trace.kernel_ms(category="optimizer") > 0


@pytest.mark.gpu
def test_what_nsys_and_ncu_run_ends_well(tmp_path: Path) -> None:
    result = invoke(
        "profile",
        "small",
        "--context",
        "128",
        "--batch",
        "1",
        "--tool",
        "api",
        "--results",
        tmp_path,
    )
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_times_of_interpreted_kernels_are_said_to_be_no_gpus(tmp_path: Path) -> None:
    arguments = (
        "1x1x32x16",
        "--device",
        "cpu",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--implementation",
        "triton",
    )
    assert "their times are NumPy's and say nothing of a GPU" in profiled(tmp_path, *arguments)[0]
