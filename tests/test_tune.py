"""Configuration of launches around the tables: offline compilation, tuning, the launch log, the way
down.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch

from cs336_systems.attention import flash_attention
from cs336_systems.attention.contract import compute_oracle, contract_errors
from cs336_systems.attention.tiles import AttentionConfig, KernelConfig, select_config
from cs336_systems.attention.tiles.choice import (
    SHARED_MEMORY_LIMIT_BYTES,
    TABLES,
    TARGET_OF_CAPABILITY,
)
from cs336_systems.attention.tiles.kernel_config import KERNELS
from cs336_systems.attention.triton import launch
from cs336_systems.bench.harness import Provenance, Sweep
from cs336_systems.bench.records import Record, case_to_dict, read_records
from cs336_systems.bench.spec import Cell, Disagreement, Unsupported, load
from cs336_systems.book import frames
from cs336_systems.book.frames import load_frame
from cs336_systems.commands import kernels as kernels_command
from cs336_systems.commands import tune as tune_command
from cs336_systems.compiler import offline as compilation
from cs336_systems.compiler.offline import (
    ARCHITECTURES,
    CompileReport,
    CompileRequest,
    arch_of_capability,
    compile_configs,
    triton_version,
)
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.device import get_device_info
from cs336_systems.subjects.tuning import (
    ROWS,
    TUNE_FLASH,
    chosen_tiles,
    proposed_rows,
    tune_cells,
    tuned_on,
)
from tests.command_line import assert_refused, invoke
from tests.test_records import record as valid_record
from tests.test_s4_attention import assert_contract, inputs

COVERS = (
    "cs336_systems/attention/tiles",
    "cs336_systems/attention/triton",
    "cs336_systems/experiments/beyond/tile_choice.py",
    "cs336_systems/subjects/tuning.py",
)
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
NO_CUDA = pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device here")
JUDGE = "3.6.0"  # the Triton of the machines that the sm_90 table was measured on


def named(name: str) -> KernelConfig:
    return KernelConfig.from_name(name)


def request(name: str, **change) -> CompileRequest:
    arguments = {"arch": "sm90", "head_dim": 64, "dtype": "bfloat16", "is_causal": True, **change}
    return CompileRequest(config=named(name), **arguments)


# Compiling without a GPU


SHIPPED = [
    CompileRequest(config=config, arch="sm90", head_dim=tile, dtype="bfloat16", is_causal=is_causal)
    for (_, width, tile), row in TABLES["sm90"].items()
    if width == 2 and tile <= 128
    for config in dict.fromkeys(row.configs)
    for is_causal in ((True, False) if triton_version() == JUDGE else (True,))
]
OPTIONS = {rest: request(f"sm90_forward_64x64_{rest}") for rest in ("w4_s2", "w4_s3", "w8_s2")}
GOOD, BAD = (
    request("sm80_dq_64x64_w4_s1", arch="sm80"),
    request("sm80_dq_2048x2048_w4_s1", arch="sm80"),
)


@pytest.fixture(scope="module")
def reports() -> dict[CompileRequest, CompileReport]:
    return {
        report.request: report for report in compile_configs([*OPTIONS.values(), GOOD, BAD], jobs=2)
    }


@pytest.fixture(scope="module")
def shipped() -> list[CompileReport]:
    """What the installed Triton makes of the sm_90 table's 16-bit rows up to head tile 128."""
    return list(compile_configs(SHIPPED, jobs=2))


@pytest.mark.slow
def test_shipped_rows_of_hopper_compile_and_fit_as_estimated(shipped):
    assert len(shipped) >= 12
    for report in shipped:
        assert not report.failure, report
        assert 0 < report.shared_bytes <= SHARED_MEMORY_LIMIT_BYTES["sm90"], report
        assert 32 < report.registers <= 255, report
        estimate = report.request.config.shared_memory_bytes(report.request.head_dim, 2)
        assert report.shared_bytes <= estimate <= 1.25 * report.shared_bytes, report


@pytest.mark.slow
def test_shipped_rows_of_hopper_neither_spill_nor_wait(shipped):
    if triton_version() != JUDGE:
        pytest.skip(f"registers are judged with triton {JUDGE}, and this is {triton_version()}")
    for report in shipped:
        assert report.serialized == report.spill_bytes == 0, report


def test_the_compiler_is_asked_for_what_is_launched(reports):
    """More warps share the same tile, and deeper pipelines take more shared memory: the options
    arrive.
    """
    two, three, eight_warps = (reports[OPTIONS[rest]] for rest in ("w4_s2", "w4_s3", "w8_s2"))
    tile_bytes = 64 * 64 * 2
    assert three.shared_bytes - two.shared_bytes == 2 * tile_bytes  # one more K tile and V tile
    assert eight_warps.registers < two.registers


def test_what_does_not_compile_is_a_report(reports):
    good, bad = reports[GOOD], reports[BAD]
    assert good.failure == "" and good.obstacle(10_000) == ""
    assert bad.registers == 0 and bad.failure
    assert bad.obstacle(10_000) == f"does not compile: {bad.failure}"


def die_on_dq(request: CompileRequest) -> CompileReport:
    """Stands in for the compiler in a child process."""
    if request.config.kernel == "dq":
        os._exit(1)
    return CompileReport(request=request, registers=len(os.environ.get("TRITON_INTERPRET", "")))


@pytest.mark.slow
def test_a_crash_costs_only_what_caused_it(monkeypatch):
    monkeypatch.setattr(compilation, "compile_here", die_on_dq)
    requests = [request(f"sm90_{kernel}_64x64_w4_s1") for kernel in ("dq", "forward")]
    reports = {report.request.config.kernel: report for report in compile_configs(requests, jobs=1)}
    assert reports["dq"].failure == "the compiler crashed"
    # Nor is the parent's interpreter switch there.
    assert reports["forward"].failure == "" and reports["forward"].registers == 0


def test_compilation_refuses_what_it_does_not_know(monkeypatch):
    assert arch_of_capability((9, 0)) == "sm90" and arch_of_capability((10, 0)) == "sm100"
    assert arch_of_capability((12, 0)) is None and arch_of_capability(None) is None
    assert {*ARCHITECTURES, "portable"} == TABLES.keys() == SHARED_MEMORY_LIMIT_BYTES.keys()

    def absent(package: str) -> str:
        raise compilation.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(compilation.metadata, "version", absent)
    with pytest.raises(ValueError, match="triton is not installed, and it is the compiler"):
        list(compile_configs([request("sm90_dq_64x64_w4_s1")]))


# The launch log


@pytest.fixture
def fresh_log(monkeypatch):
    """The log as a new process finds it; call it to set the switch."""

    def forget() -> None:
        launch._log_is_on.cache_clear()
        launch._print_once.cache_clear()

    def switch(value: str | None) -> None:
        forget()
        if value is None:
            monkeypatch.delenv("CS336_ATTN_LOG", raising=False)
        else:
            monkeypatch.setenv("CS336_ATTN_LOG", value)

    yield switch
    forget()


def attend(seqlen: int, dtype: torch.dtype = torch.float32) -> None:
    q = torch.randn(1, 1, seqlen, 32, dtype=dtype, device=DEVICE, requires_grad=True)
    flash_attention(q, q, q, is_causal=True, backend="triton").sum().backward()


def test_the_log_has_one_line_for_each_kernel_and_shape(fresh_log, capfd):
    fresh_log("1")
    attend(64)
    attend(64)
    lines = capfd.readouterr().err.splitlines()
    capability = torch.cuda.get_device_capability() if HAS_CUDA else None
    arch = "interpreter" if capability is None else "sm_{}{}".format(*capability)
    shape = {
        "head_dim": 32,
        "batch": 1,
        "heads": 1,
        "seqlen_q": 64,
        "seqlen_k": 64,
        "dtype": "float32",
    }
    expected = [
        select_config(kernel, capability=capability, is_causal=True, **shape) for kernel in KERNELS
    ]
    assert [line for line in lines if line.startswith("attention: ")] == [
        f"attention: kernel={config.kernel} head_dim=32 dtype=float32 seqlen_q=64 seqlen_k=64 arch={arch} "
        f"config={config.name}"
        for config in expected
    ]
    attend(65)
    attend(65, torch.float16)
    assert capfd.readouterr().err.count("attention: ") == 6


@pytest.mark.parametrize("value", [None, "0"])
def test_no_log_unless_asked(value, fresh_log, capfd, monkeypatch):
    fresh_log(value)
    attend(64)
    monkeypatch.setenv("CS336_ATTN_LOG", "1")  # read once a process
    attend(64)
    assert "attention: " not in capfd.readouterr().err


# The way down where a configuration does not fit


@pytest.mark.filterwarnings("ignore:.*does not fit this GPU")
def test_of_several_kernels_the_largest_gives_way_as_long_as_there_is_a_smaller():
    """On a GPU that has room for so many bytes, by the estimate."""
    from triton.runtime.errors import OutOfResources

    def attend(room: int) -> list[str]:
        launched = []

        def launcher(**configs: KernelConfig) -> None:
            for config in configs.values():
                launched.append(config.spelling)
                if (needed := config.shared_memory_bytes(128, 2)) > room:
                    raise OutOfResources(needed, room, "shared memory")

        q = torch.empty(1, 1, 8, 128, dtype=torch.float16, device=DEVICE)
        configs = {name: named(name) for name in ("sm80_dkdv_64x128_w8_s2", "sm80_dq_64x64_w4_s2")}
        launch.launch_fitting(launcher, configs, q, seqlen_q=8, seqlen_k=8)
        return launched

    assert attend(room=110_000) == ["64x128_w8_s2", "64x64_w8_s2", "64x64_w4_s2"]
    with pytest.raises(OutOfResources, match="shared memory, Required: .*, Hardware limit: 10"):
        attend(room=10)


@pytest.mark.filterwarnings("ignore:.*does not fit this GPU")
def test_flash_attention_goes_to_the_next_smaller(monkeypatch):
    """The whole way through the operator, forward and backward, with a GPU that has room for
    one-stage pipelines.
    """
    from triton.runtime.errors import OutOfResources

    from cs336_systems.attention.triton import passes as function

    def refusing(launch):
        def refuse(*arguments, **options):
            for config in (options[name] for name in options if name.endswith("config")):
                if config.num_stages > 1:
                    raise OutOfResources(2, 1, "shared memory")
            return launch(*arguments, **options)

        return refuse

    monkeypatch.setattr(function, "launch_forward", refusing(function.launch_forward))
    monkeypatch.setattr(function, "launch_backward", refusing(function.launch_backward))
    names = {kernel: named(f"portable_{kernel}_64x64_w4_s3") for kernel in KERNELS}
    q, grad = (torch.randn(1, 2, 65, 64, device=DEVICE, dtype=torch.float16) for _ in range(2))
    leaf = q.clone().requires_grad_()
    with pytest.warns(
        UserWarning,
        match="portable_forward_64x64_w4_s2 does not fit .* using portable_forward_64x64_w4_s1",
    ):
        output = flash_attention(
            leaf, leaf, leaf, backend="triton", config=AttentionConfig(**names)
        )
    with pytest.warns(
        UserWarning, match="portable_dq_64x64_w4_s2 does not fit .* using portable_dq_64x64_w4_s1"
    ):
        (gradient,) = torch.autograd.grad(output, leaf, grad)
    oracle = compute_oracle(q, q, q, grad)
    assert max(contract_errors(oracle, {"output": output}).values()) <= 1
    expected = sum(oracle.expected[f"grad_{name}"] for name in "qkv")
    bound = sum(oracle.bounds[f"grad_{name}"] for name in "qkv")
    assert (gradient - expected).abs().max() <= bound + 1e-2 * expected.abs().max()


# Measuring and proposing


def shape(**change) -> AttentionShape:
    dtype = "bfloat16" if HAS_CUDA else "float16"
    defaults = {
        "batch": 1,
        "heads": 1,
        "seqlen_q": 64,
        "seqlen_k": 64,
        "head_dim": 32,
        "is_causal": True,
    }
    return AttentionShape(**{**defaults, "dtype": dtype, **change})


CHOICE = load("tile_choice")
RUN = RunConfig(scale="handout" if HAS_CUDA else "tiny", device=DEVICE)


def tune_cell(name: str) -> Cell:
    (cell,) = tune_cells([shape()], KERNELS, "portable", [name])
    return cell


@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_a_wrong_configuration_is_not_timed(kernel, monkeypatch):
    from cs336_systems.attention.triton import backward, forward

    right = {"forward": forward.launch_forward, "dkdv": backward.launch_backward}[kernel]

    def wrong(*arguments, **options):
        first, *rest = right(*arguments, **options)
        return first * 1.5, *rest

    monkeypatch.setattr(
        *((forward, "launch_forward") if kernel == "forward" else (backward, "launch_backward")),
        wrong,
    )
    with pytest.raises(Disagreement, match="is off by .* times the numerical contract's bound"):
        list(CHOICE.measure(tune_cell(f"portable_{kernel}_64x64_w4_s1"), RUN))


def test_a_configuration_that_does_not_fit_is_unsupported(monkeypatch):
    from triton.runtime.errors import OutOfResources

    from cs336_systems.attention.triton import forward

    def too_large(*_, **__):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(forward, "launch_forward", too_large)
    with pytest.raises(
        Unsupported,
        match="portable_dq_64x64_w4_s1: out of resource: shared memory, Required: 300000",
    ):
        list(CHOICE.measure(tune_cell("portable_dq_64x64_w4_s1"), RUN))


def record(shape: AttentionShape, name: str, samples: list[float], **changes) -> Record:
    row = ROWS[named(name).kernel]
    values = {
        "problem": TUNE_FLASH,
        "case": case_to_dict(shape),
        "implementation": name,
        "samples": samples,
    }
    return valid_record(
        **values | {"mode": row.mode, "quantity": row.quantity, "kernel": name} | changes
    )


SHORT, LONG = (
    AttentionShape(
        batch=1,
        heads=16,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=64,
        is_causal=True,
        dtype="bfloat16",
    )
    for seqlen in (1024, 4096)
)


def frame_of(*records: Record, shapes=(SHORT, LONG)) -> pd.DataFrame:
    return load_frame(CHOICE, tuned_on(shapes, records, (9, 0)))


def test_the_proposed_row_is_the_best_in_the_mean_of_those_that_ran_everywhere():
    a, b, c, d = (
        f"sm90_forward_{rest}"
        for rest in ("128x64_w8_s3", "64x64_w4_s2", "64x64_w4_s3", "128x128_w8_s2")
    )
    shipped = chosen_tiles("forward", SHORT, (9, 0))
    frame = frame_of(
        record(SHORT, a, [9.0]),  # replaced by the next
        record(SHORT, a, [1.5, 1.1, 1.2]), record(LONG, a, [10.0]),  # 1.2 and 1.0 of the best
        record(SHORT, b, [1.0]), record(LONG, b, [13.0]),  # 1.0 and 1.3
        record(SHORT, shipped.name, [1.25]), record(LONG, c, [11.0]),
        record(SHORT, d, [], status="skipped", message="spills"),
        record(SHORT, "sm90_dq_128x64_w8_s3", [3.0]),
        # of a whole backward, as older records are
        record(SHORT, "sm90_dq_64x64_w4_s2", [0.1], quantity="time"),
        record(replace(LONG, heads=1), d, [0.1]),  # no shape of this run
    )  # fmt: skip
    assert proposed_rows(frame) == [
        '("forward", 2, 64): "128x64_w8_s3",  # at most 1.20 x the best of 2 shapes',
        '("dq", 2, 64): "128x64_w8_s3",  # at most 1.00 x the best of 1 shapes',
    ]
    (line,) = CHOICE.tables["grid"].build(frame).lines
    texts = [cell.text for cell in line[1:]]
    assert texts == ["forward", shipped.spelling, "1.25", named(b).spelling, "1.00", "1.25", "3"]


def test_a_named_configuration_runs_beside_the_table_s():
    dq, forward = "sm90_dq_64x64_w4_s1", chosen_tiles("forward", SHORT, (9, 0)).name
    cells = tune_cells([SHORT, LONG], ["forward", "dq"], "sm90", [dq, forward], (9, 0))
    assert [(cell.case, cell.implementation) for cell in cells] == [
        (case, name)
        for case in (SHORT, LONG)
        for name in (forward, chosen_tiles("dq", case, (9, 0)).name, dq)
    ]


def test_a_proposal_of_another_precision_says_that_a_call_needs_one():
    shape = replace(SHORT, dtype="float32")
    dq, forward = (
        record(shape, f"sm90_{rest}", [1.0])
        for rest in ("dq_32x32_w8_s1", "forward_64x64_w4_s1_tf32x3")
    )
    rows = proposed_rows(frame_of(dq, forward, shapes=[shape]))
    assert rows[0].endswith("shapes; only if all kernels of the head tile take ieee") and rows[
        1
    ].endswith("shapes")


def test_a_proposal_that_reads_by_tma_says_what_other_inputs_take():
    a, b, c = (
        f"sm90_forward_{rest}" for rest in ("64x128_w4_s2_tma", "64x64_w4_s2", "64x64_w4_s3")
    )
    (row,) = proposed_rows(
        frame_of(record(SHORT, a, [1.0]), record(SHORT, b, [1.5]), record(SHORT, c, [1.2]))
    )
    assert (
        '("forward", 2, 64): (Only("64x128_w4_s2_tma", tma=True), "64x64_w4_s3"),  # at most 1.00 x'
        in row
    )
    (alone,) = proposed_rows(frame_of(record(SHORT, a, [1.0])))
    assert '(Only("64x128_w4_s2_tma", tma=True), ...),' in alone


# The commands


@NO_CUDA
def test_nothing_is_tuned_without_a_gpu():
    assert_refused(
        invoke("tune", "flash"),
        "tune flash measures on a GPU, and there is none here (the interpreter's",
    )
    assert_refused(invoke("tune", "flash", "--compile-only"), "name one with --arch")
    assert_refused(
        invoke("doctor", "--kernels"),
        "doctor --kernels compiles for one of sm80, sm86, sm89, sm90, sm100",
    )


@pytest.mark.slow
def test_compile_only_compiles_the_named_configurations():
    names = ["sm90_forward_64x64_w4_s1", "sm90_dq_64x64_w4_s1"]
    result = invoke(
        "tune", "flash", "--compile-only", "--arch", "sm90", "--head-dim", "64", "--causal",
        "--config", names[0], "--config", names[1], "--kernel", "forward",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "_64x64_" in line]
    assert [row[:4] for row in rows] == [[names[0], "64", "bfloat16", "causal"]]
    registers, spilled, shared_kib = float(rows[0][4]), float(rows[0][5]), float(rows[0][6])
    assert 32 < registers <= 255 and spilled == 0 and shared_kib >= 2 * 64 * 64 * 2 / 1024
    assert f"triton {triton_version()}" in result.stdout
    assert "1 of 1 are worth measuring (at most 256 bytes spilled)" in result.stdout


def fake_compiler(requests, jobs=None):
    """Reports by a rule: dkdv spills 300 bytes, dq does not fit."""
    for request in requests:
        kernel = request.config.kernel
        yield CompileReport(
            request=request, registers=200, spill_bytes=300 if kernel == "dkdv" else 0,
            shared_bytes=10**6 if kernel == "dq" else 1024,
        )  # fmt: skip


def test_doctor_shows_every_row_of_the_table(monkeypatch):
    monkeypatch.setattr(compilation, "compile_configs", fake_compiler)
    result = invoke("doctor", "--kernels", "--arch", "sm80")
    assert result.exit_code == 0, result.output
    for (kernel, width, tile), row in TABLES["sm80"].items():
        dtype = "bfloat16" if width == 2 else "float32"
        names = [config.name for config in row.configs]
        # of keys
        names += [f"{name}/{compilation.SPLIT_PARTS}" for name in names if kernel == "forward"]
        for name in names:
            for mask in ("causal", "full"):
                start = [name, str(tile), dtype, mask, "200"]
                (line,) = [
                    line
                    for line in result.stdout.splitlines()
                    if line.split()[: len(start)] == start
                ]
                remark = {
                    "dkdv": "spills 300 bytes",
                    "dq": "needs 1,000,000 bytes of shared memory, sm80 has 166,912",
                }
                assert remark.get(kernel, "") in line
    assert "16-bit kernels up to head dim 128 that spill: 4 of 16" in result.stdout


def test_nothing_worth_measuring_exits_1(monkeypatch):
    monkeypatch.setattr(compilation, "compile_configs", fake_compiler)
    arguments = (
        "tune",
        "flash",
        "--compile-only",
        "--arch",
        "sm90",
        "--kernel",
        "dkdv",
        "--head-dim",
        "64",
    )
    result = invoke(*arguments)
    assert result.exit_code == 1 and "0 of " in result.stdout
    monkeypatch.setattr(tune_command, "MAX_SPILL_BYTES", 300)
    assert invoke(*arguments).exit_code == 0


@pytest.mark.slow
def test_tuning_measures_what_compiles_and_only_once(monkeypatch, tmp_path):
    """The whole command, with the interpreter in the GPU's place and a compiler that refuses dq."""
    monkeypatch.setattr(compilation, "compile_configs", fake_compiler)

    def open_sweep(run, results, problems, *_, rerun):
        sweep = Sweep(
            replace(RUN, seed=run.seed), results, Provenance(commit="0123456789ab", dirty=False), rerun=rerun,
            interpret=not HAS_CUDA,
        )  # fmt: skip
        sweep.device = replace(get_device_info(), compute_capability=(9, 0))
        sweep.lock()
        return sweep

    monkeypatch.setattr(tune_command, "_require_gpu", lambda: None)
    monkeypatch.setattr(frames, "INTERPRETED", "none")  # whose times are told as a GPU's
    monkeypatch.setattr(tune_command, "open_sweep", open_sweep)
    shape = AttentionShape(
        batch=1, heads=1, seqlen_q=64, seqlen_k=64, head_dim=32, is_causal=True, dtype="float16"
    )  # fmt: skip
    shipped = {kernel: chosen_tiles(kernel, shape, (9, 0)).name for kernel in ("forward", "dq")}
    arguments = [
        "tune",
        "flash",
        "--dtype",
        "float16",
        "--seqlen",
        "64",
        "--head-dim",
        "32",
        "--heads",
        "1",
    ]
    arguments += ["--causal", "--results", tmp_path, "--config", "portable_forward_64x64_w4_s1"]
    arguments += ["--config", "portable_dq_64x64_w4_s1"]
    first = invoke(*arguments)
    assert first.exit_code == 0, first.output
    assert "2 skipped, 2 ok" in first.stdout
    assert re.search(
        r'\("forward", 2, 64\): .*"64x64_w4_s\d".*  # at most 1.00 x the best of 1 shapes',
        first.stdout,
    )
    records = read_records(tmp_path / "records" / "tune_flash.jsonl")
    skipped = ("skipped", "needs 1,000,000 bytes of shared memory, sm90 has 232,448")
    assert {record.implementation: (record.status, record.message) for record in records} == {
        "portable_dq_64x64_w4_s1": skipped,
        shipped["dq"]: skipped,
        "portable_forward_64x64_w4_s1": ("ok", ""),
        shipped["forward"]: ("ok", ""),
    }
    again = invoke(*arguments)
    assert again.exit_code == 0 and "2 ok before, 2 skipped before" in again.stdout
    assert len(read_records(tmp_path / "records" / "tune_flash.jsonl")) == 4
    nothing = invoke(*arguments[:-4], "--config", "portable_dq_64x64_w4_s1", "--seed", "1")
    assert nothing.exit_code == 1 and "error: nothing could be measured" in nothing.stderr


# On a GPU


@pytest.mark.gpu
def test_a_real_lack_of_shared_memory_goes_to_the_next_smaller():
    target = TARGET_OF_CAPABILITY.get(torch.cuda.get_device_capability(), "portable")
    huge = {kernel: named(f"{target}_{kernel}_128x128_w8_s4") for kernel in ("forward", "dq")}
    tensors = inputs(1, 2, 2, 300, 300, 256, torch.bfloat16, "cuda")
    with pytest.warns(UserWarning, match="_128x128_w8_s4 does not fit this GPU"):
        assert_contract(*tensors, is_causal=True, backend="triton", config=AttentionConfig(**huge))


@pytest.mark.gpu
def test_tune_flash_on_a_gpu(tmp_path):
    arguments = [
        "tune",
        "flash",
        "--seqlen",
        "512",
        "--head-dim",
        "64",
        "--heads",
        "2",
        "--causal",
        "--kernel",
        "dq",
    ]
    arguments += ["--results", tmp_path, "--commit", "0123456789ab", "--clean"]
    target = TARGET_OF_CAPABILITY.get(torch.cuda.get_device_capability(), "portable")
    arguments += ["--config", f"{target}_dq_64x64_w4_s1", "--config", f"{target}_dq_64x64_w4_s2"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "proposed rows:" in result.stdout and '("dq", 2, 64)' in result.stdout
    (file,) = tmp_path.rglob("tune_flash.jsonl")
    records = read_records(file)
    assert len(records) >= 2 and {(record.status, record.quantity) for record in records} == {
        ("ok", "dq_time")
    }
    assert f"{len(records)} ok before" in invoke(*arguments).stdout


@pytest.mark.gpu
def test_the_compiler_s_numbers_are_the_loaded_kernel_s():
    """What offline compilation says is what the driver loads: registers and shared memory."""
    from cs336_systems.attention.triton.forward import flash_forward_kernel

    arch = kernels_command.machine_arch("this test")
    config = named(f"{arch}_forward_64x64_w4_s2")
    (report,) = compile_configs(
        [CompileRequest(config=config, arch=arch, head_dim=64, dtype="bfloat16", is_causal=True)]
    )
    q = torch.randn(2, 16, 1024, 64, dtype=torch.bfloat16, device="cuda")
    flash_attention(
        q, q, q, is_causal=True, backend="triton", config=AttentionConfig(forward=config)
    )
    loaded = [
        kernel
        for cache in flash_forward_kernel.device_caches.values()
        for kernel in cache[0].values()
        if (kernel.metadata.num_warps, kernel.metadata.num_stages, kernel.metadata.shared)
        == (4, 2, report.shared_bytes)
    ]
    assert report.registers in [getattr(kernel, "n_regs", None) for kernel in loaded]
