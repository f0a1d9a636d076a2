"""The command line: one line and exit code 2 for a caller's mistake; interruption; the report
twice.
"""

import importlib
import io
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from cs336_systems.attention.masks import parse_mask
from cs336_systems.bench.harness import Sweep
from cs336_systems.bench.records import read_records
from cs336_systems.bench.spec import measured_problems
from cs336_systems.cli import main
from cs336_systems.commands import kernels, sweeps
from cs336_systems.commands.profile import show_trace
from cs336_systems.commands.shared import one_line_errors, out_of_memory_in_one_line, wait_briefly
from cs336_systems.compiler import offline as compilation
from cs336_systems.config import MODEL_SIZES, FieldError, Precision, RunConfig
from cs336_systems.handout import HANDOUT
from cs336_systems.measure.text import write_whole
from cs336_systems.measure.trace import Kernel, Trace
from cs336_systems.subjects.attention_builders import load_name
from cs336_systems.subjects.profiled import parse_case
from cs336_systems.training import TrainingConfig
from cs336_systems.training.hyperparameters import byte_model
from cs336_systems.training.loop import RunOptions
from tests.command_line import ROOT, assert_refused, interrupt, invoke, start, tiny_run
from tests.processes import is_running, wait_until

REFUSALS = [
    ("run flash", "unknown problem 'flash'; did you mean 'flash_benchmarking'? `cs336-"),
    ("run nope", "unknown problem 'nope'; `cs336-systems list` shows the names"),
    ("run naive_ddp", "it is answered by `cs336-systems train --wrapper naive --ranks 2`"),
    ("run flash_forward", "flash_forward measures nothing; it is graded"),
    ("run --all --shard 3/2", "--shard must be I/N with 1 <= I <= N, got '3/2'"),
    ("run benchmarking_script --implementation a.b:C", "takes no implementation of your own"),
    ("run", "give problem names or --all"),
    ("run flash_benchmarking --all", "not both"),
    ("run --all --scale huge", "error: --scale must be one of auto, tiny, smoke, handout, got 'huge'"),
    ("run --all --device tpu", "'tpu'"),
    ("run --all --rerun maybe", "--rerun must be none, failed or all, got 'maybe'"),
    ("run --all --implementation magic", "unknown implementation 'magic'; known: eager"),
    ("run --all --model tests.broken_models:Nobody", "Nobody"),
    ("run flash_benchmarking attention_shapes --model cs336_systems.model:TransformerLM",
     "error: --model has no effect on flash_benchmarking, attention_shapes"),
    ("run --all --time-budget nan", "--time-budget must be a positive number of seconds, got nan"),
    ("run --all --dirty --commit=", "--commit must not be empty, got ''"),
    ("run flash_benchmarking --scale tiny --device cpu --implementation flex",
     "flash_benchmarking has no cells of flex"),
    ("run benchmarking_script --heads 16", "--heads has no effect on benchmarking_script"),
    ("run naive_ddp_benchmarking --mode forward", "--mode has no effect on naive_ddp_benchmarking"),
    ("run dense_masks --mode sideways", "--mode must be one of forward, "),
    ("run dense_masks --seqlen 4096,x", "--seqlen must be positive numbers with commas between them"),
    ("run dense_masks --head-dim 0", "--head-dim must be positive numbers"),
    ("run dense_masks --stages", "--stages has no effect on dense_masks"),
    ("run flash_benchmarking --stages --implementation eager", "give --stages or --implementation"),
    (f"run dense_masks --heads {10**29}", "error: --heads must be at most 2147483647 each, got 1000"),
    ("tune flash --kernel up", "--kernel must be one of forward, dkdv, dq, got 'up'"),
    ("tune flash --head-dim 257", "--head-dim must be between 1 and 256, got 257"),
    ("tune flash --seqlen 0", "error: --seqlen must be a positive int, got 0"),
    ("tune flash --heads 0", "error: --heads must be a positive int, got 0"),
    ("tune flash --compile-only --arch portable", "sm89, sm90, sm100, got 'portable'"),
    ("tune flash --arch sm90", "--arch goes with --compile-only"),
    ("tune flash --compile-only --arch sm90 --kernel dq --config sm90_forward_64x64_w4_s1",
     "--config must name configurations of dq, got sm90_forward_64x64_w4_s1"),
    ("doctor --arch sm90", "--arch goes with --kernels"),
    ("doctor --kernels --arch sm70", "arch must be one of sm80, sm86, sm89, sm90, sm100"),
    ("doctor --mask nothing", "mask pattern must be one of"),
    ("doctor --seed 1", "--seqlen, --block-size, --heads and --seed go with --mask"),
    (f"doctor --mask causal --seqlen {2**40}", "tiles, and at most 4,194,304 are diagnosed"),
    ("doctor --mask causal+dilated:8192/2 --seqlen 262144", "2,147,483,648 pairs of tokens of dilated:8192/2"),
    (f"doctor --mask random:0.5 --seed {2**70}", "seed must be at most 9223372036854775807"),
    ("profile small-proxy --full --device cpu", "a full mask is an option of attention shapes"),
    ("profile 1x1x64x32 --model a:B --device cpu", "--model is an option of models, and '1x1x64x32' is an"),
    ("profile nothing", "case must be a model size"),
    ("profile 0x1x64x32", "case must be a model size"),
    ("profile small-proxy --tool vtune", "--tool must be one of torch, nsys, ncu, got 'vtune'"),
    ("profile small-proxy --tool nsys --device cpu", "--tool nsys needs a CUDA device"),
    ("profile small-proxy --mode ../../x --tool nsys --print", "got '../../x'"),
    ("profile small-proxy --model no_such_module:X --device cpu", "no_such_module"),
    ("profile small-proxy --model tests.broken_models:Bigram --device cpu", "must have modules to"),
    ("memory --model xxl", "--model must be one of small"),
    ("memory --model small --context 99999999999999", "batch and context_length must need at most"),
    ("memory --batch -1", "error: --batch must be a positive int, got -1"),
    ("memory --context 0", "error: --context must be a positive int, got 0"),
    ("memory --fits many", "--fits must be a number with one of B, "),
    ("memory --snapshot nothing.pickle", "error: --snapshot nothing.pickle: no such file"),
    ("memory --snapshot nothing.pickle --batch 2", "--snapshot is read as it is, without --batch"),
    (f"generate --out nowhere --seed {2**63}", "error: --seed must be from 0 to 9223372036854775807, got 9223"),
    ("generate --out nowhere --length 0", "--length must be at least 1, got 0"),
    ("memory --model small --checkpoint half", "--checkpoint must be none, "),
    ("compare nothing nothing", "nothing: no such file or folder"),
    ("compare a b --threshold -1", "--threshold must be a finite percentage, not negative, got -1.0"),
    ("compare a b --fail-on all", "--fail-on must be one of regression, any, none, got 'all'"),
    ("compare a b --problem flash", "unknown problem 'flash'; did you mean 'flash_benchmarking'? `cs336-"),
    ("report", "no records of this machine"),
    ("report --check --folder x", "give --check alone"),
    ("grade nothing.py --time-limit inf", "--time-limit must be positive and at most 86400 seconds, got inf"),
    ("train --device cpu --batch 1000000000000", "usable here: take a smaller --batch, "),
    ("report --folder nothing", "no records in"),
]  # fmt: skip


@pytest.mark.parametrize("command_line, message", REFUSALS, ids=[line for line, _ in REFUSALS])
def test_wrong_arguments_are_one_line(command_line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(invoke(*command_line.split()), message)
    assert not any(tmp_path.rglob("*.jsonl"))


# (a call with a wrong value, its message in Python, the command line with this value, its message)
FIELDS = [
    (lambda: TrainingConfig(learning_rate=-1.0),
     "TrainingConfig.learning_rate must be finite and not negative, got -1.0",
     "train --lr -1", "--lr must be finite and not negative, got -1.0"),
    (lambda: byte_model(MODEL_SIZES["small"], context_length=0),
     "ModelConfig.context_length must be a positive int, got 0",
     "train --size small --context-length 0", "--context-length must be a positive int, got 0"),
    (lambda: replace(MODEL_SIZES["small"], context_length=0),
     "ModelConfig.context_length must be a positive int, got 0",
     "memory --model small --context 0", "--context must be a positive int, got 0"),
    (lambda: Precision(autocast="int8"),
     "Precision.autocast must be one of float16, bfloat16, got 'int8'",
     "memory --autocast int8", "--autocast must be one of float16, bfloat16, got 'int8'"),
    (lambda: RunConfig(scale="tiny", device="cpu", cell_timeout_s=0),
     "RunConfig.cell_timeout_s must be a positive int, got 0",
     "run --all --device cpu --cell-timeout 0", "--cell-timeout must be a positive int, got 0"),
    (lambda: RunOptions(checkpoint_every=1),
     "out must be given to write or resume from checkpoints",
     "train --checkpoint-every 1", "--out must be given to write or resume from checkpoints"),
    (lambda: parse_case("1x1x64x32", mode="train_step"),
     "mode of an attention shape must be one of forward, backward, forward_backward, "
     "got 'train_step'",
     "profile 1x1x64x32 --device cpu --mode train_step",
     "--mode of an attention shape must be one of forward, backward, forward_backward, "
     "got 'train_step'"),
    (lambda: load_name("no_such_module:X"),
     "implementation must be package.module:Name, 'no_such_module:X' cannot be loaded: "
     "ModuleNotFoundError: No module named 'no_such_module'",
     "run flash_benchmarking --device cpu --implementation no_such_module:X",
     "--implementation must be package.module:Name, 'no_such_module:X' cannot be loaded: "
     "ModuleNotFoundError: No module named 'no_such_module'"),
    (lambda: parse_mask("causal", seqlen=64, heads=0), "heads must be an int from 1 on, got 0",
     "doctor --mask causal --heads 0", "--heads must be an int from 1 on, got 0"),
]  # fmt: skip


@pytest.mark.parametrize("call, told, command_line, shown", FIELDS, ids=[row[2] for row in FIELDS])
def test_a_wrong_value_is_told_by_its_field_in_python_and_by_its_option_in_the_shell(
    call, told, command_line, shown, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == told
    refused = invoke(*command_line.split())
    assert (refused.exit_code, refused.stderr) == (2, f"error: {shown}\n")


def test_a_message_that_only_begins_like_a_field_is_shown_as_it_is(capsys):
    """A regular expression once made an option of every message that began with such a word."""
    with pytest.raises(typer.Exit), one_line_errors():
        raise ValueError("batch must be contiguous, got a view")
    with pytest.raises(typer.Exit), one_line_errors(model="model"):
        raise FieldError("model", "must be nano, got small")
    assert capsys.readouterr().err.splitlines() == [
        "error: batch must be contiguous, got a view",
        "error: model must be nano, got small",
    ]


@pytest.mark.parametrize("text", ["def f(:", "raise SystemExit(3)", "raise KeyError('x')"])
def test_an_implementation_whose_file_fails_is_refused_in_one_line(text, tmp_path, monkeypatch):
    """A mistake in a reader's own file ended in a traceback, or without a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    (tmp_path / "own_file.py").write_text(text)
    arguments = tiny_run(tmp_path, "flash_benchmarking", "--implementation", "own_file:X")
    assert_refused(
        invoke(*arguments),
        "--implementation must be package.module:Name, 'own_file:X' cannot be loaded: ",
    )


def test_a_refused_run_leaves_the_folder_free(tmp_path, monkeypatch):
    """The file of the lock stayed open until the garbage collector found it."""
    unlocked = []
    unlock = Sweep.unlock
    monkeypatch.setattr(
        Sweep, "unlock", lambda sweep: unlocked.append(sweep.folder) or unlock(sweep)
    )
    refused = invoke(*tiny_run(tmp_path, "flash_benchmarking", "--implementation", "flex"))
    assert_refused(refused, "flash_benchmarking has no cells of flex")
    assert len(unlocked) == 1


@pytest.mark.parametrize(
    "error", [MemoryError("8 TB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_one_line(error, capsys):
    """Both ended in a traceback."""
    with pytest.raises(typer.Exit) as end, out_of_memory_in_one_line():
        raise error
    assert end.value.exit_code == 1
    assert (
        capsys.readouterr().err
        == f"error: out of memory, take a smaller batch, context or model: {error}\n"
    )


def test_other_errors_of_ours_keep_their_traceback():
    with (
        pytest.raises(RuntimeError, match="a mistake of ours"),
        one_line_errors(),
        out_of_memory_in_one_line(),
    ):
        raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize("blocked", ["records", "records/leaderboard_2025.jsonl"])
def test_records_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path, blocked):
    """A folder in the place of a file of records once failed behind the first cell."""
    from cs336_systems.bench.harness import results_folder
    from cs336_systems.device import get_device_info

    path = (
        results_folder(tmp_path, get_device_info("cpu"), RunConfig(scale="tiny", device="cpu"))
        / blocked
    )
    if path.suffix:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True)
        path.write_text("a file where the folder should be")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweep, "measure", lambda *_, **__: pytest.fail("measured"))
        assert_refused(
            invoke(*tiny_run(tmp_path, "leaderboard_2025")), f"{path} cannot be written: "
        )


def test_report_without_records(tmp_path):
    (tmp_path / "something" / "records").mkdir(parents=True)
    refused = invoke("report", "--results", tmp_path, "--folder", "nothing")
    assert_refused(
        refused,
        "nothing; there are some of something, or measure something first: cs336-systems run --all",
    )
    refused = invoke(
        "report", "--results", tmp_path, "--folder", "something", "--problem", "flash_benchmarking"
    )
    assert_refused(refused, "no records of flash_benchmarking in ")
    assert refused.stderr.endswith("cs336-systems run flash_benchmarking\n"), (
        "once there was no word at all"
    )


def test_list_and_doctor():
    listed = invoke("list", env={"COLUMNS": "40"})
    names = list(dict.fromkeys((*HANDOUT, *measured_problems())))
    assert listed.exit_code == 0 and listed.stdout.splitlines()[::2] == names, (
        "whole names, on any terminal"
    )
    assert "(section 2.1.5, 1 point, 2025, 2026, `run`)" in listed.stdout
    assert (
        "(beyond the handout, `run`)" in listed.stdout
        and "(section 7, 15 points, 2026, `grade`)" in listed.stdout
    )
    doctor = invoke("doctor", "--device", "cpu")
    assert doctor.exit_code == 0 and "backend triton" in doctor.stdout
    assert re.search(r"memory +[\d.]+ GiB", doctor.stdout) and "None" not in doctor.stdout


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_a_second_run_finishes(tmp_path):
    arguments = tiny_run(tmp_path, "pytorch_attention", "mixed_precision_accumulation")
    process = start(arguments, start_new_session=True)
    records = "pytorch_attention.jsonl"
    # a cell has finished
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.rglob(records)), process)
    errors = interrupt(process)
    assert process.returncode == 130 and "the same command continues" in errors
    kept = [record for path in tmp_path.rglob("*.jsonl") for record in read_records(path)]
    assert kept and all(record.status == "ok" for record in kept)

    again = start(arguments)
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert re.search(r"^\d+ cells? of 2 problems at scale tiny into .+-tiny$", errors, re.MULTILINE)
    records = [record for path in tmp_path.rglob("*.jsonl") for record in read_records(path)]
    assert len({record.key for record in records}) == len(records), "nothing was measured twice"
    assert {record.key for record in kept} < {record.key for record in records}
    report = invoke("report", "--results", tmp_path)
    assert report.exit_code == 0, report.stderr
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert invoke("report", "--results", tmp_path).exit_code == 0
    assert first == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_ctrl_c_among_ranks_leaves_no_warning_of_pythons(tmp_path):
    """The resource tracker warned of two leaked semaphores, those of the ranks' queue."""
    process = start(
        [*tiny_run(tmp_path, "naive_ddp_benchmarking"), "--scale", "smoke"], start_new_session=True
    )
    assert process.stderr is not None
    while "naive_ddp_benchmarking 1/1" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(3)  # or so, until the ranks run
    assert "resource_tracker" not in interrupt(process)


@pytest.mark.slow
def test_cells_that_failed_before_are_said_to_have_failed(tmp_path, monkeypatch):
    """A second run over nothing but failed rows called them finished and exited 0."""
    monkeypatch.chdir(ROOT)
    arguments = tiny_run(tmp_path, "benchmarking_script", "--model", "tests.broken_models:Raises")
    first = invoke(*arguments)
    assert first.exit_code == 1 and "nothing could be measured" in first.stderr
    said = r"failed \(small-proxy .*\): RuntimeError: CUDA error: an illegal memory access"
    assert re.search(said, first.stderr), first.stderr
    assert re.search(
        r"^benchmarking_script 1/3: eager small-proxy .*\d$", first.stderr, re.MULTILINE
    ), "no terminal"
    again = invoke(*arguments)
    assert again.exit_code == 1 and "nothing could be measured" in again.stderr
    assert re.search(
        "3 failed before in 0 s; --rerun failed measures again what failed$",
        again.stdout,
        re.MULTILINE,
    )


@pytest.mark.slow
def test_a_run_says_why_it_skipped(tmp_path):
    """It ended at "nothing could be measured" or "1 partly skipped", and the reasons were in the
    records alone.
    """
    for _ in range(2):
        run = invoke(*tiny_run(tmp_path, "kernel_counters"))
        assert run.exit_code == 1
        assert (
            run.stderr.count(
                "  skipped triton, hopper, sdpa_cudnn: a CPU has no counters that ncu reads\n"
            )
            == 1
        )
    part = invoke(*tiny_run(tmp_path, "hopper_ladder"))
    assert (
        "hopper_ladder, cells: 1 partly skipped" in part.stdout
        and "  skipped sdpa_cudnn: " in part.stderr
    )


def test_the_help_of_memory_names_every_size():
    told = invoke("memory", "--help").stdout
    assert all(name in told for name in MODEL_SIZES), told


def test_warnings_are_one_line_of_the_command(monkeypatch):
    """They were two lines, of a path in the package and of its source."""
    # the command replaces it
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    told = []
    main(
        lambda: told.append(
            warnings.formatwarning("x.jsonl:1: not a\nrecord", UserWarning, "x.py", 3)
        )
    )
    (line,) = told[0].splitlines()
    assert line.startswith("warning: x.jsonl:1: not a") and line.endswith("record")


@pytest.mark.parametrize(
    "name, code", [("SIGTERM", 128 + signal.SIGTERM), ("SIGKILL", -signal.SIGKILL)]
)
@pytest.mark.slow
def test_the_measuring_process_ends_with_its_parent(name, code, tmp_path):
    """A terminated or killed run left a process behind that went on with a cell that never ends,
    holding the GPU.
    """
    process = start(
        tiny_run(tmp_path, "benchmarking_script", "--model", "tests.broken_models:Hangs")
    )

    def hanging() -> list[str]:
        said = "".join(log.read_text() for log in tmp_path.rglob("worker.log"))
        return re.findall(r"hanging in process (\d+)\n", said)

    child = int(wait_until(hanging, process)[0])
    assert is_running(child)
    process.send_signal(signal.Signals[name])  # to the parent alone
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert ("the same command continues" in errors) == (name != "SIGKILL")
    wait_until(lambda: not is_running(child), seconds=10)


@pytest.mark.slow
def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    """Two runs measured every cell twice, and each other's load."""
    arguments = tiny_run(tmp_path, "pytorch_attention")
    first = start([*arguments, "benchmarking_script", "--model", "tests.broken_models:Hangs"])
    try:
        wait_until(lambda: list(tmp_path.rglob("*.jsonl")), first)
        assert_refused(invoke(*arguments), "another run is measuring into")
    finally:
        first.terminate()
        first.communicate(timeout=60)
    assert invoke(*arguments).exit_code == 0


@pytest.mark.slow
def test_the_published_folder_away_from_the_repository_gets_a_report(tmp_path, monkeypatch):
    assert invoke(*tiny_run(tmp_path, "pytorch_attention")).exit_code == 0
    next(tmp_path.glob("cpu-*")).rename(tmp_path / "nvidia-h200")
    monkeypatch.chdir(tmp_path)
    result = invoke("report", "--results", ".", "--folder", "nvidia-h200")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "nvidia-h200" / "report.html").is_file()
    assert_refused(invoke("report", "--results", ".", "--folder", ""), "--folder must not be empty")
    for folder in ("../x", "..", ".", "/tmp", "a/b", "a/", "a\\b"):
        assert_refused(
            invoke("report", "--results", ".", "--folder", folder),
            "--folder must be the name of a folder",
        )


# What comes from files is no markup


def test_profiling_says_how_long_it_takes(tmp_path):
    """`profile small` took two minutes on a laptop without a word."""
    profiled = invoke(
        "profile", "1x1x16x16", "--device", "cpu", "--steps", "1", "--results", tmp_path
    )
    assert profiled.exit_code == 0 and "the first took" in profiled.stdout


def test_names_of_kernels_are_no_markup_and_give_no_orders_to_a_terminal(capsys):
    """[clone .kind] behind the name of a function vanished, and [/tag] ended the command with a
    traceback.
    """
    facts = {
        "category": "other",
        "phase": "forward",
        "start_us": 0.0,
        "duration_us": 1.0,
        "ranges": (),
    }
    kernels = tuple(
        Kernel(name=name, step=0, **facts) for name in ("copy [clone .cold]", "add [/tag]", "a\x1b[2Jb")
    )  # fmt: skip
    show_trace(Trace(kernels=kernels, on_gpu=True, step_ms=(1.0,)), top=3)
    shown = capsys.readouterr().out
    assert "copy [clone .cold]" in shown and "add [/tag]" in shown
    assert r"a\x1b[2Jb" in shown and "\x1b[2J" not in shown


def test_what_the_user_says_of_waiting_threads_stays():
    """Left alone, libgomp's threads look for milliseconds: calls of 0.2 ms took 40 where two shared
    a core.
    """
    alone, own = {"HOME": "/"}, {"OMP_WAIT_POLICY": "active"}
    for environment in (alone, own):
        wait_briefly(environment)
    assert alone == {"HOME": "/", "GOMP_SPINCOUNT": "1000"} and own == {"OMP_WAIT_POLICY": "active"}


@pytest.mark.parametrize(
    ("command_line", "during"),
    [
        ("generate --out .", "training.folder.read_config"),
        ("profile small", "device.resolve_device"),
        ("report", "device.get_device_info"),
        ("memory --model small", "subjects.model_memory.simulated_trace"),
        ("compare a b", "book.comparison.read_all"),
        ("list", "bench.spec.outlines"),
    ],
)
def test_ctrl_c_has_a_word_for_every_command(command_line, during, monkeypatch):
    """These ended with 130 and said nothing."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"cs336_systems.{during}", interrupted)
    result = invoke(*command_line.split())
    assert result.exit_code == 130 and result.stderr == "interrupted\n"


def test_a_termination_has_a_word_for_every_command(monkeypatch):
    """`report` ended by SIGTERM itself, in the middle of a file."""
    monkeypatch.setattr(
        "cs336_systems.device.get_device_info", lambda _: signal.raise_signal(signal.SIGTERM)
    )
    result = invoke("report")
    assert result.exit_code == 143 and result.stderr == "interrupted\n"


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path, monkeypatch):
    """A report that was ended while it was written was half of one."""
    page = tmp_path / "report.html"
    write_whole(page, "before\n")

    def ended(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", ended)
        write_whole(page, "after\n")
    assert page.read_text() == "before\n"
    write_whole(page, "after\n")
    assert page.read_text() == "after\n" and list(tmp_path.iterdir()) == [page], (
        "nothing aside is left"
    )


def test_count_and_time_of_the_progress_bar_fit_into_80_columns(monkeypatch):
    """The case beside them cut them off."""
    narrow = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(sweeps, "Console", lambda **_: narrow)
    with sweeps.progress_bar() as progress:
        longest = max(measured_problems(), key=len)
        progress.add_task(
            longest, total=118, completed=3, cell="overlap xl-proxy batch=4 context=512"
        )
    assert re.search(r"  3/118 0:00:00 overl", narrow.file.getvalue())


def test_compiling_says_how_far_it_is_where_there_is_no_terminal(monkeypatch, capsys):
    reports = [SimpleNamespace(request=number) for number in range(25)]
    monkeypatch.setattr(compilation, "compile_configs", lambda requests: reports)
    kernels.compile_with_progress(range(25))
    assert capsys.readouterr().err.splitlines()[1:] == ["compiled 10 of 25", "compiled 20 of 25"]


def test_a_missing_package_is_named_in_one_line(capsys, monkeypatch):
    """It was a traceback."""
    monkeypatch.setitem(sys.modules, "pandas", None)

    def needs_pandas():
        importlib.import_module("pandas")

    with pytest.raises(SystemExit) as ended:
        main(needs_pandas)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: pandas is not installed: pip install pandas\n"


def test_the_core_alone_says_which_extra_the_command_line_needs():
    """A light installation ended in a traceback."""
    code = (
        "import sys; sys.modules['typer'] = None; from cs336_systems.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2 and result.stdout == ""
    cure = "the command line needs the extra 'lab': pip install 'cs336-systems[lab]'"
    assert result.stderr == f"error: typer is not installed, and {cure}\n"
