"""The README and the pages of docs/: their snippets run as pasted, and the API page is what the
code says.
"""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.attention.choose import available_backends
from cs336_systems.distributed.checkpoint import checkpoints
from cs336_systems.distributed.fsdp import FSDP
from tools import api_docs

ROOT = Path(__file__).parent.parent
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_WORDS = 1_300  # of the README, with its tables


@pytest.mark.parametrize("document", ["README.md", "docs/package.md", "docs/sinks.md"])
def test_the_snippet_runs_as_pasted(document, tmp_path):
    snippets = PYTHON.findall((ROOT / document).read_text(encoding="utf-8"))
    assert len(snippets) == 1
    (tmp_path / "snippet.py").write_text(snippets[0])
    names = runpy.run_path(str(tmp_path / "snippet.py"))
    assert names["q"].grad.isfinite().all() and names["q"].grad.any()


def test_the_fsdp_script_trains_goes_on_and_exports(tmp_path):
    """Two ranks, then a second run from the checkpoint to the export alone."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(PYTHON.findall(page)[0])
    said = [
        subprocess.check_output(
            [sys.executable, "train.py"], cwd=tmp_path, timeout=120, text=True
        ).splitlines()
        for _ in range(2)
    ]
    assert [line[: line.index(" loss ")] for line in said[0][:-1]] == ["step 10:", "step 20:"]
    assert all(5 < float(line.split()[-1]) < 6.5 for line in said[0][:-1])  # about ln 256
    whole, own = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", said[0][-1]))
    norms = (2 * 2 + 1) * 64  # which every rank has whole
    assert said[1] == said[0][-1:] and whole + norms == 2 * own
    load = 'TransformerLM(**SIZE).load_state_dict(torch.load("model.pt"))'
    assert f"`{load}`" in page
    subprocess.run(
        [sys.executable, "-c", f"from train import *\n{load}"], cwd=tmp_path, check=True, timeout=60
    )
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == [
        "step-00000010",
        "step-00000020",
    ]


def test_the_script_for_transformers_trains_and_saves(tmp_path):
    """Both wrappers, which have the same losses, and what they save loads into the plain model."""
    transformers = pytest.importorskip("transformers")
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (script,) = (text for text in PYTHON.findall(page) if "import AutoModelForCausalLM" in text)
    (tmp_path / "hf.py").write_text(script)
    said = subprocess.check_output(
        [sys.executable, "hf.py"], cwd=tmp_path, timeout=300, text=True
    ).splitlines()
    sharded, whole = (
        [float(line.split()[-1]) for line in said if line.startswith(f"{name}, step")]
        for name in ("fsdp", "ddp")
    )
    assert len(whole) == 3 and sharded == pytest.approx(whole, abs=2e-4)
    states = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("fsdp", "ddp")
    ]
    assert states[0].keys() == states[1].keys()
    for name, weight in states[0].items():
        assert (weight - states[1][name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("used", ["split_context", "apply_tensor_parallel"])
def test_the_scripts_for_long_sequences_and_split_matrices_train(tmp_path, used):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (script,) = (text for text in PYTHON.findall(page) if used in text)
    (tmp_path / "script.py").write_text(script)
    losses = subprocess.check_output(
        [sys.executable, "script.py"], cwd=tmp_path, timeout=120, text=True
    )
    assert all(5 < loss < 6 for loss in json.loads(losses))  # about ln 256


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_package_page_has_no_link_that_only_the_repository_can_follow():
    """An index shows docs/package.md without the files beside it."""
    assert 'readme = "docs/package.md"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "package.md").read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link] == []


@pytest.fixture
def chapters():
    return api_docs.read_chapters(api_docs.EXAMPLES.read_text(encoding="utf-8"))


def test_the_api_page_and_its_pictures_are_fresh():
    """`tools/api_docs.py` writes them; it runs every example but Triton's, and fails where one
    does.
    """
    assert api_docs.stale(api_docs.build()) == []


def test_methods_are_listed_with_their_meaning():
    """A wrapper's page named its constructor only."""
    assert api_docs.methods(api_docs.BlockMask, {"BlockMask.causal"}) != api_docs.methods(
        api_docs.BlockMask, set()
    )
    listed = "\n".join(api_docs.methods(FSDP, set()))
    for name in (
        "no_sync()",
        "finish_gradient_synchronization()",
        "clip_grad_norm_(max_norm, eps)",
    ):
        assert f"- `{name}`: " in listed
    assert "__init__" not in listed and "register_buffer" not in listed


def test_the_example_of_the_triton_function_runs(chapters):
    has_triton = available_backends()["triton"] == "ok"
    if not has_triton:
        pytest.skip("triton does not run here")
    attention = chapters[0]
    attention.sections = [
        section for section in attention.sections if section.name == "FlashAttentionTriton"
    ]
    assert api_docs.run_examples(attention)[1] == []


@pytest.mark.parametrize("module", ["attention", "attention.masks", "model", "analysis"])
def test_every_export_has_an_example(chapters, module):
    chapter = next(chapter for chapter in chapters if chapter.title == f"cs336_systems.{module}")
    exported = {
        name
        for name in importlib.import_module(chapter.title).__all__
        if name != "MAX_LIST_DENSITY"
    }
    assert exported <= {section.name for section in chapter.sections if section.examples} | {
        "BlockMask"
    }


def test_every_mask_constructor_is_in_the_gallery(chapters):
    made = {
        name for name, value in vars(api_docs.BlockMask).items() if isinstance(value, classmethod)
    }
    shown = {section.name for chapter in chapters for section in chapter.sections}
    assert {f"BlockMask.{name}" for name in made if not name.startswith("_")} <= shown


def test_an_example_with_a_wrong_result_is_found():
    chapter = api_docs.Chapter("wrong", sections=[api_docs.Section("sum", examples=">>> 1 + 1\n3")])
    assert "Expected:\n    3\nGot:\n    2" in api_docs.run_examples(chapter)[1][0]


def test_the_matrix_follows_the_rules():
    assert api_docs.takes("hopper", (9, 0), "bfloat16", 256) and not api_docs.takes(
        "hopper", (9, 0), "bfloat16", 257
    )
    assert not api_docs.takes("hopper", (9, 0), "bfloat16", 129, "block_mask")
    assert not api_docs.takes("hopper", (8, 0), "bfloat16") and not api_docs.takes(
        "triton", (8, 0), "float64"
    )
