"""Section 4: FlashAttention-2, 15 and 5 points."""

import pytest

from cs336_systems.grading.grade import checks_of


@pytest.mark.parametrize("check", checks_of("flash_forward"), ids=lambda check: check.name)
def test_flash_forward(check, passes):
    passes(check)


@pytest.mark.parametrize("check", checks_of("flash_backward"), ids=lambda check: check.name)
def test_flash_backward(check, passes):
    passes(check)
