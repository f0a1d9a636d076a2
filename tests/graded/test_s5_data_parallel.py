"""Section 5: data parallelism that overlaps the backward, 5 points, and in buckets, 8 points."""

import pytest

from cs336_systems.grading.grade import checks_of


@pytest.mark.parametrize("check", checks_of("ddp_overlap_individual_parameters"), ids=lambda check: check.name)
def test_ddp_overlap_individual_parameters(check, passes):
    passes(check)


@pytest.mark.parametrize("check", checks_of("ddp_overlap_bucketed"), ids=lambda check: check.name)
def test_ddp_overlap_bucketed(check, passes):
    passes(check)
