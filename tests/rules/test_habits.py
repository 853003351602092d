"""Habits of the code: no swallowed exception, documented settings, metric names written once."""

import ast
import re

import pytest
import yaml

from tests.rules.sources import ROOT, Source, Violation, dotted_name, python_sources, report

PACKAGE_SOURCES = python_sources("flare_ray")
CONFIG_SOURCES = python_sources("flare_ray/config")
BROAD = {"Exception", "BaseException"}
METRIC_NAME = re.compile(r"^(flare_(?!ray)[a-z0-9_]+|vllm:[a-z0-9_:]+)$")
METRIC_CLASSES = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
METRIC_LIBRARIES = ("prometheus_client", "ray.util.metrics")
METRICS_FILE = "flare_ray/metrics/names.py"


def check_handlers(source: Source) -> list[Violation]:
    """No bare ``except``; a broad handler raises, logs or uses what it caught."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                found.append(Violation(source.path, node.lineno, "bare except"))
            elif _is_broad(node.type) and not _handles(node):
                found.append(Violation(source.path, node.lineno, "exception is swallowed"))
        elif (
            isinstance(node, ast.Call)
            and dotted_name(node.func) in {"suppress", "contextlib.suppress"}
            and any(_is_broad(arg) for arg in node.args)
        ):
            found.append(Violation(source.path, node.lineno, "suppress() of every exception"))
    return found


def _is_broad(node: ast.expr) -> bool:
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(dotted_name(name) in BROAD for name in names)


def _handles(handler: ast.ExceptHandler) -> bool:
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Name) and node.id == handler.name:
            return True
        if isinstance(node, ast.Attribute) and node.attr in {"exception", "critical", "error"}:
            return True
    return False


def check_open_keywords(source: Source) -> list[Violation]:
    """No ``**kwargs``: what a function accepts is written in its signature.

    ``**settings: Unpack[T]`` is such a signature: T, a typed dictionary, lists the names.
    """
    return [
        Violation(source.path, node.lineno, f"{node.name} takes **{node.args.kwarg.arg}")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.args.kwarg is not None
        and not _is_unpacked(node.args.kwarg.annotation)
        and node.name not in {"__init_subclass__", "__pydantic_init_subclass__"}
    ]


def _is_unpacked(annotation: ast.expr | None) -> bool:
    return (
        isinstance(annotation, ast.Subscript)
        and dotted_name(annotation.value).split(".")[-1] == "Unpack"
    )


def check_config_fields(sources: tuple[Source, ...]) -> list[Violation]:
    """Each settings model is frozen and closed, and each of its fields has a description."""
    found = []
    for source, node in _models(sources):
        if not _is_closed(node, sources):
            message = f"{node.name} is not frozen=True, extra='forbid'"
            found.append(Violation(source.path, node.lineno, message))
        for stmt in node.body:
            if not isinstance(stmt, ast.AnnAssign) or not isinstance(stmt.target, ast.Name):
                continue
            if "ClassVar" in ast.dump(stmt.annotation) or stmt.target.id == "model_config":
                continue
            if not _has_description(stmt):
                message = f"{node.name}.{stmt.target.id} has no description"
                found.append(Violation(source.path, stmt.lineno, message))
    return found


def _models(sources: tuple[Source, ...]) -> list[tuple[Source, ast.ClassDef]]:
    classes = [
        (source, node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    known = {"BaseModel", "pydantic.BaseModel"}
    while True:
        derived = {
            node.name
            for _, node in classes
            if any(dotted_name(_unsubscripted(base)) in known for base in node.bases)
        }
        if derived <= known:
            return [(source, node) for source, node in classes if node.name in known]
        known |= derived


def _unsubscripted(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node


def _is_closed(node: ast.ClassDef, sources: tuple[Source, ...]) -> bool:
    given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    for stmt in node.body:
        if isinstance(stmt, ast.Assign) and dotted_name(stmt.targets[0]) == "model_config":
            call = stmt.value
            if isinstance(call, ast.Call):
                given |= {
                    k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)
                }
    if given.get("frozen") is True and given.get("extra") == "forbid":
        return True
    if "frozen" in given or "extra" in given:
        return False
    parents = {dotted_name(_unsubscripted(base)) for base in node.bases}
    return any(_is_closed(other, sources) for _, other in _models(sources) if other.name in parents)


def _has_description(stmt: ast.AnnAssign) -> bool:
    parts = [stmt.annotation, *([stmt.value] if stmt.value is not None else [])]
    for node in (inner for part in parts for inner in ast.walk(part)):
        if isinstance(node, ast.Call) and dotted_name(node.func).split(".")[-1] == "Field":
            for keyword in node.keywords:
                if keyword.arg == "description":
                    value = keyword.value
                    return not isinstance(value, ast.Constant) or bool(str(value.value).strip())
    return False


def check_metric_names(source: Source) -> list[Violation]:
    """A metric's name is a literal in names.py, once, and nowhere else in the package."""
    literals = [
        (node.value, node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and METRIC_NAME.match(node.value)
    ]
    if source.path == METRICS_FILE:
        names = [name for name, _ in literals]
        return [
            Violation(source.path, line, f"{name} is declared twice")
            for i, (name, line) in enumerate(literals)
            if name in names[:i]
        ]
    found = [
        Violation(source.path, line, f"metric name {name!r} belongs in {METRICS_FILE}")
        for name, line in literals
    ]
    return found + _inline_metrics(source)


def _inline_metrics(source: Source) -> list[Violation]:
    """Metric objects built with a literal name, whatever the name looks like."""
    imported = {
        i.target.rpartition(".")[2] for i in source.imports if i.target.startswith(METRIC_LIBRARIES)
    } & METRIC_CLASSES
    return [
        Violation(source.path, node.lineno, f"metric named inline; declare it in {METRICS_FILE}")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and dotted_name(node.func).rpartition(".")[2] in imported
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses a mapping with a repeated key (plain YAML keeps the last one)."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.constructor.ConstructorError(
                None, None, f"repeated key(s) {repeated}", node.start_mark
            )
        return super().construct_mapping(node, deep=deep)


def check_yaml(path: str, text: str) -> list[Violation]:
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        return [Violation(path, 1, f"does not parse: {error}")]
    return [] if document else [Violation(path, 1, "is empty")]


def _all(check) -> list[Violation]:
    return [violation for source in PACKAGE_SOURCES for violation in check(source)]


def test_no_exception_is_swallowed():
    found = _all(check_handlers)
    assert not found, report(found)


def test_signatures_are_closed():
    found = _all(check_open_keywords)
    assert not found, report(found)


def test_config_models_are_closed_and_their_fields_documented():
    found = check_config_fields(CONFIG_SOURCES)
    assert not found, report(found)


def test_metric_names_are_declared_once_in_names():
    found = _all(check_metric_names)
    assert not found, report(found)


def test_every_deployment_yaml_parses():
    paths = sorted((ROOT / "deployments").rglob("*.y*ml"))
    found = [
        violation
        for path in paths
        for violation in check_yaml(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, report(found)


# Negative controls.


@pytest.mark.parametrize(
    "handler",
    [
        "except: raise",
        "except Exception: pass",
        "except (OSError, Exception): x = 1",
        "except BaseException as e: ...",
    ],
)
def test_handler_rule_catches_swallowing(handler):
    assert check_handlers(Source.parse("a.py", f"try:\n    f()\n{handler}\n"))


@pytest.mark.parametrize(
    "handler",
    [
        "except OSError: pass",
        "except Exception as e: fail(e)",
        "except Exception: log.exception('round %d', 3)",
        "except Exception: raise",
    ],
)
def test_handler_rule_accepts_a_handler_that_acts(handler):
    assert not check_handlers(Source.parse("a.py", f"try:\n    f()\n{handler}\n"))


def test_handler_rule_catches_suppress_of_everything():
    source = Source.parse("a.py", "with contextlib.suppress(Exception):\n    f()\n")
    assert check_handlers(source)


def test_keyword_rule_catches_open_signature():
    assert check_open_keywords(Source.parse("a.py", "def f(**kwargs): ...\n"))
    assert check_open_keywords(Source.parse("a.py", "def f(**kwargs: Any): ...\n"))


def test_keyword_rule_accepts_a_typed_dictionary():
    assert not check_open_keywords(Source.parse("a.py", "def f(**settings: Unpack[Names]): ...\n"))


CLOSED = 'class A(BaseModel, frozen=True, extra="forbid"):\n'


@pytest.mark.parametrize(
    "text",
    [
        CLOSED + "    x: int\n",
        CLOSED + "    x: int = 3\n",
        CLOSED + '    x: int = Field(3, description=" ")\n',
        CLOSED + "    pass\nclass B(A):\n    y: int\n",
        'class A(BaseModel):\n    x: int = Field(3, description="d")\n',
        'class A(BaseModel, frozen=True):\n    x: int = Field(3, description="d")\n',
    ],
)
def test_config_rule_catches_offender(text):
    assert check_config_fields((Source.parse("flare_ray/config/a.py", text),))


@pytest.mark.parametrize(
    "text",
    [
        CLOSED + '    x: int = Field(3, description="d")\n',
        CLOSED + '    x: Annotated[int, Field(description="d")] = 3\n',
        CLOSED + '    K: ClassVar[int] = 3\nclass B(A):\n    y: int = Field(description="d")\n',
        'class A(BaseModel):\n    model_config = ConfigDict(frozen=True, extra="forbid")\n',
        "class A:\n    x: int\n",
    ],
)
def test_config_rule_accepts_documented_model(text):
    assert not check_config_fields((Source.parse("flare_ray/config/a.py", text),))


def test_metric_rule_catches_foreign_repeated_and_inline_names():
    literal = 'NAME = "flare_num_requests_running"\n'
    assert check_metric_names(Source.parse("flare_ray/actors/a.py", literal))
    assert not check_metric_names(Source.parse(METRICS_FILE, literal))
    assert check_metric_names(Source.parse(METRICS_FILE, literal * 2))
    inline = 'from prometheus_client import Gauge\nG = Gauge("requests", "text")\n'
    assert check_metric_names(Source.parse("flare_ray/metrics/export.py", inline))
    package_name = 'NAME = "flare_ray"\n'
    assert not check_metric_names(Source.parse("flare_ray/cli/a.py", package_name))


@pytest.mark.parametrize("text", ["a: [1\n", "a: 1\na: 2\n", "x:\n  b: 1\n  b: 2\n", "# nothing\n"])
def test_yaml_rule_catches_offender(text):
    assert check_yaml("deployments/a.yaml", text)


def test_yaml_rule_accepts_a_plain_file():
    assert not check_yaml("deployments/a.yaml", "a: {b: 1}\nc: [2]\n")
