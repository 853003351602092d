"""Whether a plan fits: the user's figure, this machine's, or not known."""

import msgspec
import pytest

from flare_ray.cli.plan import GIB, available_bytes, fit_text
from flare_ray.contracts.manifest import ByteBudget, PreparedManifest
from flare_ray.errors import CapacityError
from tests.support.fake_channel import make_manifest


def manifest_of(**changes) -> PreparedManifest:
    budget = ByteBudget(
        weights_bytes=3 * GIB, page_bytes=GIB, state_bytes=0, graph_pool_bytes=0, scratch_bytes=0
    )
    return msgspec.structs.replace(make_manifest(), budget=budget, **changes)


def test_plan_that_fits_says_of_how_much():
    assert fit_text(manifest_of(), 6 * GIB) == "fits: 4.000 of 6.000 GiB per rank"


def test_plan_that_does_not_fit_names_sum_and_setting():
    with pytest.raises(CapacityError, match=r"4\.000 GiB .*weights 3\.000.*tensor_parallel_size"):
        fit_text(manifest_of(), 2 * GIB)


def test_figure_of_the_user_stands_for_the_machine():
    assert available_bytes(manifest_of(), 1.5) == 3 * GIB // 2


def test_ranks_on_one_host_share_its_memory():
    alone = available_bytes(manifest_of(), None)
    assert 0 < available_bytes(manifest_of(world_size=4), None) < alone


def test_fit_on_cuda_is_unknown_where_there_is_none(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    manifest = manifest_of(device="cuda")
    assert available_bytes(manifest, None) == 0
    assert "--memory-gib" in fit_text(manifest, 0)
