"""The package root: light to import, exact about what it exports."""

import subprocess
import sys

import pytest

import flare_ray


def test_import_loads_neither_torch_nor_ray():
    code = "import sys, flare_ray; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sampling_params_are_the_request_contract():
    from flare_ray.contracts.request import SamplingParams

    assert flare_ray.SamplingParams is SamplingParams


def test_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="absent"):
        flare_ray.absent  # noqa: B018


def test_version_is_three_numbers():
    assert [part.isdigit() for part in flare_ray.__version__.split(".")] == [True] * 3
