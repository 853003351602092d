"""The commit that a measurement names."""

import subprocess

import pytest

from flare_ray.workload.environment import commit_of


def git(folder, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init")
    for name in ("inner/code", "inner/results", "outer"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("before", encoding="utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "All")
    return tmp_path


@pytest.mark.parametrize("changed", ["inner/code", "outer"])
def test_a_change_anywhere_in_the_checkout_makes_it_dirty(checkout, changed):
    assert len(commit_of(checkout / "inner")) == 40
    (checkout / changed).write_text("after", encoding="utf-8")
    assert commit_of(checkout / "inner").endswith("-dirty")


def test_ignored_and_untracked_files_do_not(checkout):
    (checkout / "inner/results").write_text("after", encoding="utf-8")
    (checkout / "new").write_text("", encoding="utf-8")
    assert len(commit_of(checkout / "inner", ignored=("results",))) == 40
    assert commit_of(checkout / "inner").endswith("-dirty")
