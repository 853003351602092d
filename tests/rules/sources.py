"""Source files as the rules see them: path, text, syntax tree, and every import.

Nothing here imports the package; a rule is a function from sources to violations, so that each test
can hand it a small offending source and see it caught.
"""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "flare_ray"


@dataclass(frozen=True)
class Violation:
    """One breach of one rule; ``str`` of it is what a failing test prints."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported name; ``target`` is absolute: ``a.b`` for ``from a import b`` too."""

    target: str
    line: int
    at_module_level: bool
    for_types_only: bool


@dataclass(frozen=True)
class Source:
    """A Python file relative to the repository root."""

    path: str
    text: str
    tree: ast.Module = field(compare=False)

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        return cls(path=path, text=text, tree=ast.parse(text, filename=path))

    @property
    def module(self) -> str:
        """Dotted module name; a package's ``__init__`` carries the package's name."""
        parts = list(Path(self.path).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def imports(self) -> tuple[Import, ...]:
        return _imports_of(self)


@cache
def _imports_of(source: Source) -> tuple[Import, ...]:
    return tuple(_walk_imports(source, source.tree, at_module_level=True, for_types_only=False))


def _walk_imports(
    source: Source, node: ast.AST, *, at_module_level: bool, for_types_only: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(source, child):
            yield Import(target, child.lineno, at_module_level, for_types_only)
        inner_level = at_module_level and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for stmt in child.body:
                wrapper = ast.Module(body=[stmt], type_ignores=[])
                yield from _walk_imports(
                    source, wrapper, at_module_level=inner_level, for_types_only=True
                )
            for stmt in child.orelse:
                wrapper = ast.Module(body=[stmt], type_ignores=[])
                yield from _walk_imports(
                    source, wrapper, at_module_level=inner_level, for_types_only=for_types_only
                )
            continue
        yield from _walk_imports(
            source, child, at_module_level=inner_level, for_types_only=for_types_only
        )


def _targets(source: Source, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _absolute_base(source, node)
        return [base if alias.name == "*" else f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and dotted_name(node.func) in {
        "importlib.import_module",
        "import_module",
        "__import__",
    }:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []


def _absolute_base(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    is_package = Path(source.path).name == "__init__.py"
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join(parts[:keep] + ([node.module] if node.module else []))


def _is_type_checking(test: ast.expr) -> bool:
    return dotted_name(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def dotted_name(node: ast.AST | None) -> str:
    """``a.b.c`` for a chain of names and attributes, else the empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def is_within(target: str, prefix: str) -> bool:
    """Whether dotted ``target`` is ``prefix`` itself or lies below it."""
    return target == prefix or target.startswith(prefix + ".")


@cache
def python_sources(*folders: str) -> tuple[Source, ...]:
    """Parsed Python files below the given folders of the repository, sorted by path."""
    paths = sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )
    return tuple(
        Source.parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    )


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths of the files git tracks and that exist in the work tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return tuple(path for path in listed.split("\0") if path and (ROOT / path).is_file())


def report(violations: list[Violation]) -> str:
    """Text of a failing assertion: a count, then one violation a line."""
    return "\n".join([f"{len(violations)} violation(s)", *map(str, violations)])
