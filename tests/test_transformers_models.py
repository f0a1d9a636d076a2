"""Every model class of Transformers that can be built small, under our attention: equal to `eager`,
or refused by name.

The classes are enumerated from the library, so that one that is new in a release cannot slip in.
"""

from typing import Any

import pytest

from cs336_systems.integrations import transformers as integration
from cs336_systems.integrations.transformers import register
from tests.transformers_models import (
    Verdict,
    compare_with_eager,
    model_classes,
    model_folders,
    ways_to_call,
)

# What is reached with the Transformers of constraints.txt. Where it becomes less, the tests name
# what was not built and why. In another release the parts hold other models: measure anew.
# Classes of each part that are built, then judged:
COVERED = (61, 47, 51, 44, 46, 30, 39, 50, 63, 41, 43, 46, 52, 34, 46, 50)
WAYS_COVERED = 71  # ways to call attention of which a module is
OURS = 80  # classes of those modules in which it is our attention that runs


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The modules that call our attention from now on, registered as cs336_walk."""
    found: list[str] = []
    right = integration.attention_forward

    def counted(module: Any, *tensors: Any, **options: Any) -> Any:
        found.append(type(module).__name__)
        return right(module, *tensors, **options)

    monkeypatch.setattr(integration, "attention_forward", counted)
    register("cs336_walk", backend="reference")
    return found


def walk(folders: list[str], calls: list[str]) -> dict[str, Verdict]:
    """The verdict on each class."""
    verdicts = {}
    for folder in folders:
        for model_class in model_classes(folder):
            name = f"{folder.partition('.')[0]}.{model_class.__name__}"
            verdicts[name] = compare_with_eager(model_class, "cs336_walk", calls)
    return verdicts


def walk_one_of_each_kind(folder: str, calls: list[str]) -> dict[str, Verdict]:
    """The verdict, with gradients and a cache, on the first class that generates and the first that
    does not.
    """
    verdicts = {}
    wanted = {True, False}
    for model_class in model_classes(folder):
        if model_class.can_generate() in wanted:
            verdict = compare_with_eager(model_class, "cs336_walk", calls, thoroughly=True)
            verdicts[f"{folder.partition('.')[0]}.{model_class.__name__}"] = verdict
            if verdict.outcome != "unbuilt":
                wanted.remove(model_class.can_generate())
    return verdicts


def of_outcome(verdicts: dict[str, Verdict], *outcomes: str) -> dict[str, str]:
    return {
        name: verdict.reason for name, verdict in verdicts.items() if verdict.outcome in outcomes
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", range(len(COVERED)))
def test_every_model_class_is_equal_to_eager_or_refused_by_name(hf, calls, part):
    """Bloom lost its causal mask under our name, CodeGen added bools to its scores, Align's text
    saw the past alone.

    Their attention is their own code, which never called us, or calls without a mask and means
    every key.
    """
    verdicts = walk(model_folders()[part :: len(COVERED)], calls)
    assert of_outcome(verdicts, "different", "broken") == {}
    unbuilt = of_outcome(verdicts, "unbuilt")
    assert len(verdicts) - len(unbuilt) >= COVERED[part], unbuilt


def test_a_model_of_each_way_to_call_attention_is_equal_or_refused(hf, calls):
    """With gradients, and with a cache from left-padded prompts: the first module of each way that
    can be built.
    """
    ways = ways_to_call(model_folders())
    wrong: dict[str, str] = {}
    unbuilt: list[dict[str, str]] = []
    ours = 0
    for folders in ways:
        reasons: dict[str, str] = {}
        for folder in folders:
            verdicts = walk_one_of_each_kind(folder, calls)
            wrong |= of_outcome(verdicts, "different", "broken")
            ours += sum(verdict.calls > 0 for verdict in verdicts.values())
            reasons |= of_outcome(verdicts, "unbuilt")
            if len(of_outcome(verdicts, "unbuilt")) < len(verdicts):
                break
        else:
            unbuilt.append(reasons)
    assert wrong == {}
    assert len(ways) - len(unbuilt) >= WAYS_COVERED, unbuilt
    assert ours >= OURS


def test_the_walk_rejects_a_lost_mask_and_a_lost_sink(hf, calls, monkeypatch):
    """Known-wrong attention, in a decoder, an encoder-decoder and a model with sinks."""
    counted = integration.attention_forward
    mistakes: dict[str, Any] = {
        "mask": lambda options: options,
        "sink": lambda options: options | {"s_aux": None},
    }
    for mistake, folder in (("mask", "llama"), ("mask", "bart"), ("sink", "gpt_oss")):

        def broken(
            module: Any,
            q: Any,
            k: Any,
            v: Any,
            mask: Any,
            *,
            _mistake: str = mistake,
            **options: Any,
        ) -> Any:
            mask = None if _mistake == "mask" else mask
            return counted(
                module, q, k, v, mask, **mistakes[_mistake](options) | {"is_causal": False}
            )

        monkeypatch.setattr(integration, "attention_forward", broken)
        register("cs336_walk", backend="reference")
        verdicts = walk([f"{folder}.modeling_{folder}"], calls)
        assert of_outcome(verdicts, "different"), verdicts
