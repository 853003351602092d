"""The page at /ui/: what is served, under which headers, and what its files may not hold."""

import dataclasses
import fnmatch
import re
import tomllib
from importlib import resources

import pytest

from flare_ray.config import IngressDeployment
from flare_ray.frontend.openapi import document
from flare_ray.frontend.page.routes import HEADERS, INDEX, MEDIA_TYPES, PATH
from flare_ray.frontend.settings import ApiSettings, load_settings
from flare_ray.metrics import names
from tests.rules.sources import ROOT
from tests.rules.test_sizes import MAX_FILE_LINES
from tests.support.served_checkpoint import served_checkpoint, served_deployment
from tests.unit.frontend.conftest import error_of

FOLDER = resources.files("flare_ray.frontend.page")
PATHS = {name: f"{PATH}/{'' if name == INDEX else name}" for name in MEDIA_TYPES}
SCRIPTS = [name for name in MEDIA_TYPES if name.endswith(".js")]
SUFFIXES = {
    names.Kind.COUNTER: ("_total",),
    names.Kind.GAUGE: ("",),
    names.Kind.HISTOGRAM: ("",),
}
MARKUP_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment"
    r"|setHTML|\beval\b|new Function|setAttribute\(\s*[\"'](?:on|style|src|href)"
)


def text_of(name):
    return FOLDER.joinpath(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(MEDIA_TYPES))
def test_every_file_is_served_whole_under_the_policy(api, name):
    answer = api.get(PATHS[name])
    assert answer.status_code == 200
    assert answer.content == FOLDER.joinpath(name).read_bytes()
    assert answer.headers["content-type"] == MEDIA_TYPES[name]
    assert {key: answer.headers[key] for key in HEADERS} == dict(HEADERS)


def test_policy_allows_the_services_own_files_and_routes_alone(api):
    policy = api.get(f"{PATH}/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert rules["default-src"] == "'none'"
    assert {"'none'", "'self'"} == set(rules.values())
    assert {"base-uri", "form-action", "frame-ancestors"} <= rules.keys()  # no default covers them


def test_a_file_that_the_browser_has_is_not_sent_again(api):
    first = api.get(PATHS[INDEX])
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = api.request("GET", PATHS[INDEX], headers={"if-none-match": known})
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["content-security-policy"] == HEADERS["content-security-policy"]
    other = api.get(PATHS["page.css"]).headers["etag"]
    assert api.request("GET", PATHS[INDEX], headers={"if-none-match": other}).status_code == 200


def test_the_address_without_a_slash_leads_there_behind_any_prefix(api):
    answer = api.get(PATH)
    assert answer.status_code == 308
    assert answer.headers["location"] == "ui/"


def test_other_names_are_not_found_in_the_apis_shape(api):
    for path in (f"{PATH}/routes.py", f"{PATH}/index.html", f"{PATH}/../settings.py"):
        assert error_of(api.get(path), 404)["code"] == "not_found"
    assert error_of(api.post(f"{PATH}/", {}), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", [PATH, *PATHS.values()])
def test_switched_off_nothing_of_it_is_found(api, path):
    api.settings = dataclasses.replace(api.settings, page=False)
    assert error_of(api.get(path), 404)["code"] == "not_found"


def test_the_setting_reaches_the_routes(tmp_path):
    assert IngressDeployment().page
    config = served_deployment(served_checkpoint(tmp_path))
    assert load_settings(config).page
    off = config.model_copy(update={"ingress": IngressDeployment(page=False)})
    settings = load_settings(off)
    assert isinstance(settings, ApiSettings)
    assert not settings.page


def test_the_openapi_document_leaves_it_out():
    assert not [path for path in document()["paths"] if path.startswith(PATH)]


@pytest.mark.parametrize("name", sorted(MEDIA_TYPES))
def test_files_load_nothing_from_elsewhere_and_hold_no_inline_code(name):
    text = text_of(name).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.MULTILINE)
    assert not re.search(r"\son\w+=|\sstyle=|@import|url\(|javascript:", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_markup_of_no_text(name):
    assert not MARKUP_FROM_TEXT.findall(text_of(name))
    assert MARKUP_FROM_TEXT.search("box.innerHTML = text")


def test_pages_files_name_each_other_and_no_others():
    loaded = set(re.findall(r'(?:href|src)="([^"]+)"', text_of(INDEX)))
    for name in SCRIPTS:
        loaded |= {path.removeprefix("./") for path in re.findall(r'from "([^"]+)"', text_of(name))}
    assert loaded == set(MEDIA_TYPES) - {INDEX}


def test_every_file_of_the_folder_is_served_or_python():
    found = {file.name for file in FOLDER.iterdir() if file.is_file()}
    assert {name for name in found if not name.endswith(".py")} == set(MEDIA_TYPES)


def test_an_installed_package_has_every_file():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["flare_ray"]
    for name in MEDIA_TYPES:
        path = f"frontend/page/{name}"
        assert any(fnmatch.fnmatch(path, pattern) for pattern in patterns), path


@pytest.mark.parametrize("name", sorted(MEDIA_TYPES))
def test_files_keep_the_sizes_of_sources(name):
    lines = text_of(name).splitlines()
    assert len(lines) <= MAX_FILE_LINES
    assert max(map(len, lines)) <= 100


def test_elements_that_scripts_ask_for_are_in_the_page():
    ids = set(re.findall(r'\sid="([^"]+)"', text_of(INDEX)))
    asked = {ident for name in SCRIPTS for ident in re.findall(r'\bat\("([^"]+)"\)', text_of(name))}
    assert asked
    assert asked <= ids


def test_metrics_that_the_status_reads_exist():
    exported = {
        series.name + suffix for series in names.declared() for suffix in SUFFIXES[series.kind]
    }
    read = set(re.findall(r'"(flare_[a-z0-9_]+)"', text_of("status.js"))) - {"flare_"}
    assert len(read) > 20
    assert read <= exported


def test_labels_that_the_status_reads_are_those_of_their_series():
    text = text_of("status.js")
    of_key = dict(re.findall(r'^  (\w+): "(flare_\w+?)(?:_total)?",$', text, re.MULTILINE))
    labels = {series.name: series.labels for series in names.declared()}
    asked = re.findall(r'totals\(\s*\w+,\s*`?(?:\$\{)?NAMES\.(\w+)[^"]*?"(\w+)"', text)
    assert len(asked) >= 9
    for key, label in asked:
        assert label in labels[of_key[key]], (key, label)


def test_sources_that_the_chat_names_are_those_of_answers():
    from flare_ray.frontend.sources import SOURCE_NAMES

    table = text_of("chat.js").split("const SOURCES = {")[1].split("\n};")[0]
    assert set(re.findall(r"^  (\w+): \[", table, re.MULTILINE)) == set(SOURCE_NAMES.values())
    styled = set(re.findall(r'\[data-source="(\w+)"\]', text_of("page.css")))
    assert styled == set(SOURCE_NAMES.values()) - {"target"}  # which stays as text is
