"""Sizes: files of at most 500 lines, functions of at most 60, at most six parameters.

A breach is either repaired or listed below with its reason; a listed breach that is gone must be
delisted, so the table never outlives its need.
"""

import ast
from collections.abc import Iterator

from tests.rules.sources import Source, Violation, dotted_name, python_sources, report

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6

# "path" for a file, "path::Class.function" for a function -> why it may stay.
EXCEPTIONS: dict[str, str] = {}

SOURCES = python_sources("flare_ray", "tests", "benchmarks", "deployments")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(source: Source) -> Iterator[tuple[str, FunctionNode]]:
    """Every function with its qualified name, nested ones and methods included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, FunctionNode | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
            if isinstance(child, FunctionNode):
                yield name, child
            yield from walk(child, name)

    yield from walk(source.tree, "")


def check_file_length(source: Source) -> dict[str, Violation]:
    lines = source.text.count("\n") + (not source.text.endswith("\n"))
    if lines <= MAX_FILE_LINES:
        return {}
    message = f"{lines} lines, at most {MAX_FILE_LINES}: split by what the parts own"
    return {source.path: Violation(source.path, 1, message)}


def check_function_length(source: Source) -> dict[str, Violation]:
    found = {}
    for name, node in functions_of(source):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            message = f"{name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            found[f"{source.path}::{name}"] = Violation(source.path, node.lineno, message)
    return found


def check_parameters(source: Source) -> dict[str, Violation]:
    found = {}
    for name, node in functions_of(source):
        if _parameters_are_given_from_outside(node):
            continue
        args = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(args) - (bool(args) and args[0] in {"self", "cls"})
        if count > MAX_PARAMETERS:
            message = f"{name} takes {count} parameters, at most {MAX_PARAMETERS}: make a record"
            found[f"{source.path}::{name}"] = Violation(source.path, node.lineno, message)
    return found


def _parameters_are_given_from_outside(node: FunctionNode) -> bool:
    """A command's options, a kernel's pointers and a test's axes cannot become a record."""
    if node.name.startswith("test_"):
        return True
    names = {dotted_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    kernels = {"triton.jit", "kernel", "inner", "inner_ordered"}
    return any(n in kernels or n.endswith((".command", ".callback")) for n in names)


CHECKS = (check_file_length, check_function_length, check_parameters)


def find_breaches(sources: tuple[Source, ...]) -> dict[str, Violation]:
    return {
        key: violation
        for check in CHECKS
        for source in sources
        for key, violation in check(source).items()
    }


def unlisted(breaches: dict[str, Violation], exceptions: dict[str, str]) -> list[Violation]:
    return [violation for key, violation in breaches.items() if key not in exceptions]


def stale(breaches: dict[str, Violation], exceptions: dict[str, str]) -> list[str]:
    return [key for key, reason in exceptions.items() if key not in breaches or not reason.strip()]


def test_files_functions_and_parameter_lists_keep_their_size():
    found = unlisted(find_breaches(SOURCES), EXCEPTIONS)
    assert not found, report(found)


def test_every_size_exception_is_still_needed_and_has_a_reason():
    assert not stale(find_breaches(SOURCES), EXCEPTIONS)


# Negative controls.


def test_file_rule_catches_501_lines():
    assert not check_file_length(Source.parse("a.py", "x = 1\n" * 500))
    assert check_file_length(Source.parse("a.py", "x = 1\n" * 501))


def test_function_rule_catches_61_lines_in_a_method():
    at_limit = "class A:\n    def f(self):\n" + "        x = 1\n" * 59
    assert not check_function_length(Source.parse("a.py", at_limit))
    over = Source.parse("a.py", at_limit + "        x = 1\n")
    assert list(check_function_length(over)) == ["a.py::A.f"]


def test_parameter_rule_catches_seven_but_not_self_or_command_options():
    six = "class A:\n    def f(self, a, b, c, d, *, e, g): ...\n"
    assert not check_parameters(Source.parse("a.py", six))
    seven = six.replace("a, b", "a, b, h")
    assert list(check_parameters(Source.parse("a.py", seven))) == ["a.py::A.f"]
    command = "@app.command()\ndef f(a, b, c, d, e, g, h): ...\n"
    assert not check_parameters(Source.parse("a.py", command))


def test_exception_table_lets_listed_pass_and_reports_stale_entries():
    breaches = find_breaches((Source.parse("a.py", "x = 1\n" * 501),))
    assert unlisted(breaches, {}) and not unlisted(breaches, {"a.py": "why"})
    assert stale(breaches, {"b.py": "why"}) == ["b.py"]
    assert stale(breaches, {"a.py": " "}) == ["a.py"]
