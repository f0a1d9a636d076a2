"""The picture of a kernel: what is recorded of a launch, what is found wrong, and the page."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run compiled where there is a GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter

from cs336_systems.learning import examples
from cs336_systems.stepper import Recording, finding_text, page_of, trace, write_page
from cs336_systems.stepper.argument import Argument, elements_of, runs
from tests.command_line import assert_refused, invoke


def record(launch: Callable[[], object]) -> Recording:
    """The recording of the one launch of a function."""
    with trace() as recorded:
        launch()
    (recording,) = recorded.launches
    return recording


def said(recording: Recording) -> list[str]:
    return [finding_text(recording, finding) for finding in recording.findings]


@triton.jit
def shifted_kernel(x_ptr, out_ptr, length, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * STRIDE + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < length)
    tl.store(out_ptr + offsets, x, mask=offsets < length)


@triton.jit
def endless_kernel(x_ptr):
    count = tl.load(x_ptr)
    while count < 1:
        count = count * 1


@triton.jit
def twice(x):
    double = x * 2
    return double


@triton.jit
def tile_kernel(x_ptr, out_ptr, rows, columns, T: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (rows, columns), (columns, 1), (0, 0), (T, T), (1, 0))
    out = tl.make_block_ptr(out_ptr, (rows, columns), (columns, 1), (0, 0), (T, T), (1, 0))
    tile = tl.load(x, boundary_check=(0, 1))
    tl.store(out, twice(tile), boundary_check=(0, 1))


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, rows, columns, T: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [T, T])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [T, T])
    out.store([0, 0], twice(x.load([0, 0])))


# What is wrong


@pytest.mark.parametrize(
    "launch", [examples.add, examples.softmax, examples.flash_forward], ids=lambda one: one.__name__
)
def test_nothing_is_wrong_with_a_right_kernel(launch):
    assert record(launch).findings == []


def test_loads_and_stores_out_of_bounds_are_found_and_do_not_run():
    """Untraced, such stores corrupt the heap."""
    results = []
    recording = record(lambda: results.append(examples.add_without_masks()))
    found = [(one.what, one.access, one.argument, one.elements) for one in recording.findings]
    past = list(range(200, 256))
    assert found == [
        ("outside", "load", "x_ptr", past),
        ("outside", "load", "y_ptr", past),
        ("outside", "store", "out_ptr", past),
    ]
    assert said(recording)[0] == (
        "line 21: load of 56 elements outside x_ptr (elements 200 to 255 of 200)"
    )
    assert torch.equal(results[0], examples.add())


def test_an_access_past_a_tensor_is_found_where_its_neighbour_lies():
    """Its address is the neighbour's: only where the pointer comes from tells."""
    both, out = torch.randn(80), torch.empty(64)
    x, y = both[:40], both[40:]
    recording = record(lambda: examples.add_kernel[(1,)](x, y, out, 64, MASKED=True, BLOCK=64))
    assert [(one.what, one.argument, len(one.elements)) for one in recording.findings] == [
        ("beside", "x_ptr", 24),
        ("outside", "y_ptr", 24),
    ]
    assert said(recording)[0].endswith("(elements 40 to 63 of 40), inside its storage")


def test_an_access_before_a_tensor_has_negative_elements():
    out = torch.empty(64)
    recording = record(lambda: shifted_kernel[(2,)](torch.randn(64), out, 64, STRIDE=-16, BLOCK=16))
    assert [one.elements for one in recording.findings[:2]] == [list(range(-16, 0))] * 2


def test_two_programs_that_store_one_element_are_found():
    x, out = torch.randn(48), torch.empty(48)
    recording = record(lambda: shifted_kernel[(3,)](x, out, 48, STRIDE=16, BLOCK=32))
    (finding,) = recording.findings
    assert (finding.what, finding.programs) == ("twice", [1, 2])
    assert finding.elements == list(range(16, 48))
    assert "32 elements of out_ptr stored by two programs" in said(recording)[0]


def test_elements_that_are_never_stored_are_found():
    x, out = torch.randn(64), torch.empty(64)
    recording = record(lambda: shifted_kernel[(3,)](x, out, 64, STRIDE=16, BLOCK=16))
    assert said(recording) == ["16 of 64 elements of out_ptr are never stored"]
    assert recording.findings[0].elements == list(range(48, 64))


def test_a_kernel_that_does_not_end_is_stopped_and_recorded():
    with (
        pytest.raises(interpreter.InterpreterError, match="does not end: 500 statements"),
        trace(most_statements=500) as recorded,
    ):
        endless_kernel[(1,)](torch.zeros(1))
    assert "does not end" in recorded.launches[0].error and recorded.launches[0].steps


def test_lanes_that_nothing_defines_read_nan_where_asked():
    """The interpreter reads 0 where a GPU reads anything."""
    x, out = torch.ones(10), torch.empty(32)
    for undefined_is_nan in (False, True):
        with trace(undefined_is_nan=undefined_is_nan) as recorded:
            shifted_kernel[(1,)](x, out, 10, STRIDE=16, BLOCK=16)
        shown = next(
            variables["x"] for *_, variables in recorded.launches[0].steps if "x" in variables
        )
        assert shown.get("odd", [0, 0, 0]) == [6 * undefined_is_nan, 0, 0]


# What is recorded


def test_values_are_the_tensors():
    results = []
    recording = record(lambda: results.append(examples.add()))
    stored = np.full(200, np.nan, np.float32)
    for *_, accesses, _ in recording.steps:
        for access in accesses:
            if access["kind"] == "store":
                first, elements = access["values"]["floats"], elements_of(access["on"])
                stored[elements] = np.frombuffer(
                    bytes(recording.values), "<f4", len(elements), first
                )
    assert np.array_equal(stored, results[0].numpy())
    assert np.array_equal(
        recording.arguments[0].start, torch.randn(200, generator=torch.Generator().manual_seed(0))
    )


def test_tiles_in_8_bits_are_as_near_as_their_range_allows():
    recording = record(examples.flash_forward)
    shown = next(
        variables["Q"] for *_, variables in recording.steps if "Q" in variables
    )  # of the first program
    codes = np.frombuffer(bytes(recording.values), np.uint8, 256, shown["codes"]).reshape(16, 16)
    span = shown["high"] - shown["low"]
    values = shown["low"] + (codes.astype(np.float32) - 3) / 252 * span
    exact = recording.arguments[0].start.reshape(2, 64, 16)[0, :16]
    assert np.abs(values - exact).max() <= span / 500


def test_the_tiles_that_a_causal_mask_hides_are_not_loaded():
    loaded = {}
    recording = record(examples.flash_forward)
    for program, _, _, _, accesses, _ in recording.steps:
        for access in accesses:
            if access["kind"] == "load" and recording.arguments[access["argument"]].name == "K_ptr":
                loaded[program] = loaded.get(program, 0) + access["lanes"] // 256
    assert loaded == {2 * tile + batch: tile + 1 for tile in range(4) for batch in range(2)}
    assert recording.grid == (4, 2, 1)
    assert recording.scalars["N_KEYS"] == 64


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("kernel", [tile_kernel, descriptor_kernel], ids=lambda one: one.__name__)
def test_block_pointers_descriptors_and_device_functions_are_followed(kernel):
    x, out = torch.randn(10, 12), torch.empty(10, 12)
    recording = record(lambda: kernel[(1,)](x, out, 10, 12, T=16))
    assert recording.findings == [] and torch.equal(out, 2 * x)
    assert set(recording.sources) == {kernel.__name__, "twice"}
    loads = [one for *_, accesses, _ in recording.steps for one in accesses]
    assert [(one["kind"], one["lanes"], one["masked"]) for one in loads] == [
        ("load", 120, 136),
        ("store", 120, 136),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_other_dtypes_show_their_numbers(dtype):
    x, out = torch.arange(16).to(dtype), torch.empty(16, dtype=dtype)
    recording = record(lambda: shifted_kernel[(1,)](x, out, 16, STRIDE=16, BLOCK=16))
    (shown,) = (variables["x"] for *_, variables in recording.steps if "x" in variables)
    assert (shown["low"], shown["high"]) == (0, 15) and torch.equal(out, x)


def test_everything_is_put_back():
    places = [interpreter, *vars(interpreter).values()]
    classes = [place for place in places if isinstance(place, type)] + [interpreter]
    before = [dict(vars(place)) for place in classes]
    record(examples.add)
    assert [dict(vars(place)) for place in classes] == before
    assert "__stepper__" not in vars(examples)
    examples.add()


def test_runs_hold_what_they_were_made_of():
    tile = (np.arange(8)[:, None] * 100 + np.arange(16)).ravel()
    assert runs(tile) == [[0, 16, 100, 8]] and runs(np.array([], int)) == []
    for seed in range(20):
        elements = np.unique(np.random.default_rng(seed).integers(0, 60, 25))
        assert elements_of(runs(elements)) == elements.tolist()


@pytest.mark.parametrize(
    "view", [lambda x: x.T, lambda x: x[1:, ::2], lambda x: x[:, 3]], ids=["T", "steps", "column"]
)
def test_elements_are_found_by_the_strides_of_a_view(view):
    tensor = view(torch.arange(6.0 * 8).reshape(6, 8))
    argument = Argument(0, "x", tensor)
    numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
    for place in np.ndindex(*tensor.shape):
        address = np.array([tensor[place].data_ptr()])
        assert argument.elements_at(address)[0] == numbers[place] and argument.holds(address)


# The page


def test_a_page_of_56_programs_is_small_and_needs_no_network(tmp_path):
    recording = record(lambda: examples.flash_forward(batch=7, length=128))
    write_page(recording, tmp_path / "flash.html")
    page = (tmp_path / "flash.html").read_text()
    assert recording.grid == (8, 7, 1) and len(page) < 3_000_000
    assert not re.search(r"https?://|src=|@import", page)


def test_a_large_launch_keeps_extremes_alone():
    recording = record(lambda: examples.flash_forward(batch=15, length=256, head_dim=64, tile=64))
    assert len(page_of(recording)) < 3_000_000


def test_the_same_launch_gives_the_same_page():
    assert page_of(record(examples.softmax)) == page_of(record(examples.softmax))


IN_THE_BROWSER = """<script>
const errors = [];
window.addEventListener("error", event => errors.push(event.message));
window.addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
function shown() {
  const pictures = [...document.querySelectorAll("canvas")].map(canvas => canvas.toDataURL());
  const words = ["say", "at", "variables", "charts"].map(id => document.getElementById(id).innerHTML);
  words.push(document.querySelector("#source .on").textContent);
  return [...pictures, ...words].join("|");
}
function watch() {
  if (!document.body.dataset.ready) return setTimeout(watch, 50);
  const there = [], forth = document.getElementById("forward"), back = document.getElementById("back");
  for (let k = 0; k < STEPS; k++) { there.push(shown()); forth.click(); }
  const end = document.getElementById("at").textContent;
  let same = 0;
  for (let k = STEPS - 1; k >= 0; k--) { back.click(); same += shown() == there[k]; }
  const found = {errors, same, different: new Set(there).size, end,
                 findings: [...document.querySelectorAll(".finding")].map(one => one.textContent)};
  document.querySelectorAll(".finding").forEach(one => one.click());
  found.said = document.getElementById("say").textContent;
  document.body.innerHTML = "<pre>" + JSON.stringify(found).replace(/</g, "&lt;") + "</pre>";
}
window.addEventListener("load", watch);
</script>"""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def browse(page: str, folder: Path, steps: int) -> dict:
    """What the page shows on `steps` steps forward and as many back."""
    watched = IN_THE_BROWSER.replace("STEPS", str(steps))
    path = folder / "watched.html"
    path.write_text(page.replace("<head>", "<head>" + watched, 1))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000"]
    options += [f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    result = subprocess.run(
        [str(CHROMIUM), *options, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    match = re.search(r"<pre>(\{.*\})</pre>", result.stdout)
    assert match, result.stderr
    return json.loads(html.unescape(match[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_steps_forward_and_back(tmp_path):
    found = browse(page_of(record(examples.flash_forward)), tmp_path, steps=60)
    assert found["errors"] == [] and found["findings"] == []
    assert found["same"] == 60 and found["different"] == 60
    assert found["end"].startswith("program (1,0), step ")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_leads_to_what_is_wrong(tmp_path):
    recording = record(examples.add_without_masks)
    found = browse(page_of(recording), tmp_path, steps=3)
    assert found["errors"] == [] and found["findings"] == said(recording)
    assert "56 elements outside its memory" in found["said"]


# The command


def test_the_command_writes_a_page_and_says_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("trace", "cs336_systems.learning.examples:add_without_masks")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(
        r"add_kernel: 4 programs, 20 steps, 0\.\d\d MiB in add_kernel\.html", lines[0]
    )
    assert len(lines) == 4 and (tmp_path / "add_kernel.html").stat().st_size > 20_000


MODULE = """
import torch
from cs336_systems.learning import examples

def nothing():
    pass

def needs(argument):
    pass

def late():
    examples.add()
    raise KeyError("late")

def compiled():
    import triton.runtime.jit
    triton.runtime.jit.JITFunction(nothing)[(1,)]()

number = 3
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lessons", "FUNCTION must be module:function, got 'lessons'"),
        ("no_lessons:f", "cannot import 'no_lessons' (ModuleNotFoundError: No module named"),
        ("lessons:f", "module 'lessons' has no function 'f'"),
        ("lessons:number", "lessons:number is no function: int"),
        ("lessons:nothing", "lessons:nothing launches no Triton kernel"),
        ("lessons:needs", "lessons:needs must take no arguments: missing a required argument"),
        (
            "lessons:late --launch 2",
            "launches Triton kernels 1 time, not 2, and ends with KeyError: 'late'",
        ),
        ("lessons:late", "lessons:late ends with KeyError: 'late'"),
        ("lessons:compiled", "nothing does not run in the interpreter: it is Gluon, or was"),
        ("cs336_systems.learning.examples:add_kernel", "add_kernel is a kernel: name a function"),
        ("lessons:late --output lessons.py/add.html", "lessons.py cannot be written"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "lessons.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert_refused(invoke("trace", *arguments.split()), message)


def test_without_the_interpreter_a_trace_is_refused(monkeypatch):
    monkeypatch.setattr("cs336_systems.device.interpreter_is_on", lambda: False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Triton is imported"):
        trace()
