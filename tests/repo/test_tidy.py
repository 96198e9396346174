"""Style limits, held by a test: a rule without a check is a wish.

Sizes: a function has at most 60 lines of code (docstring, comments and blank lines do not count)
and 7 parameters, a module at most 500 lines. What a module may not hold depends on where it is;
each test below says it in one line.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/emberkv/"

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 500
MAX_PARAMETERS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def project_files() -> tuple[str, ...]:
    """Every file that is, or would be, part of the project, relative to its root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("the project's files are known from git, and this is no git checkout")
    names = sorted(set(filter(None, listing.stdout.split("\0"))))
    return tuple(name for name in names if (ROOT / name).is_file())


def python_files(prefix: str = "") -> list[str]:
    return [n for n in project_files() if n.endswith(".py") and n.startswith(prefix)]


@cache
def source(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(source(name), filename=name)


@cache
def lines_of_code(name: str) -> frozenset[int]:
    """The numbers of the lines that hold code, docstrings left out."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source(name)).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(name)):
        if isinstance(node, (*FUNCTION_TYPES, ast.ClassDef, ast.Module)) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return frozenset(lines)


def functions(name: str) -> Iterator[Function]:
    for node in ast.walk(parsed(name)):
        if isinstance(node, FUNCTION_TYPES):
            yield node


def public_functions(name: str) -> Iterator[Function]:
    """Functions and methods that others may call: no part of their path is private."""

    def within(body: list[ast.stmt]) -> Iterator[Function]:
        for node in body:
            if isinstance(node, FUNCTION_TYPES) and not node.name.startswith("_"):
                yield node
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from within(node.body)

    yield from within(parsed(name).body)


def parameter_count(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    own = named[1:] if named and named[0].arg in {"self", "cls"} else named
    starred = [a for a in (arguments.vararg, arguments.kwarg) if a]
    return len(own) + len(arguments.kwonlyargs) + len(starred)


def names_in(expression: ast.expr | None) -> set[str]:
    if expression is None:
        return set()
    found = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(expression) if isinstance(n, ast.Attribute)}


def report(found: list[str], rule: str) -> None:
    assert not found, f"{rule}:\n  " + "\n  ".join(found)


def test_functions_are_short() -> None:
    found = []
    for name in python_files():
        code = lines_of_code(name)
        for function in functions(name):
            count = sum(n in code for n in range(function.lineno, (function.end_lineno or 0) + 1))
            if count > MAX_FUNCTION_LINES:
                found.append(f"{name}:{function.lineno} {function.name}: {count} lines")
    report(found, f"a function has at most {MAX_FUNCTION_LINES} lines of code")


def test_modules_are_short() -> None:
    counts = {name: len(source(name).splitlines()) for name in python_files()}
    found = [f"{name}: {count} lines" for name, count in counts.items() if count > MAX_MODULE_LINES]
    report(found, f"a module has at most {MAX_MODULE_LINES} lines")


def test_functions_take_few_parameters() -> None:
    found = [
        f"{name}:{function.lineno} {function.name}: {count} parameters"
        for name in python_files()
        for function in functions(name)
        if (count := parameter_count(function)) > MAX_PARAMETERS
    ]
    report(found, f"a function takes at most {MAX_PARAMETERS} parameters")


def test_errors_are_caught_by_name() -> None:
    """Only the manager, keeper, control and the command line may catch everything."""
    allowed = tuple(
        PACKAGE + place for place in ("live/manager.py", "live/keeper", "live/control", "app/")
    )
    broad = {"Exception", "BaseException"}
    found = []
    for name in python_files(PACKAGE):
        if name.startswith(allowed):
            continue
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.ExceptHandler):
                caught = names_in(node.type) or broad
            elif isinstance(node, ast.Call) and names_in(node.func) >= {"suppress"}:
                caught = set().union(*map(names_in, node.args))
            else:
                continue
            if caught & broad:
                found.append(f"{name}:{node.lineno}")
    report(found, "no bare or broad except outside live/{manager.py,keeper,control} and app/")


def test_only_the_command_line_prints() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name in python_files(PACKAGE)
        if not name.startswith(PACKAGE + "app/")
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    report(found, "no print outside app/")


def test_public_signatures_are_explicit() -> None:
    """Adapters are excepted: an engine may add keyword arguments between releases."""
    found = [
        f"{name}:{function.lineno} {function.name}"
        for name in python_files(PACKAGE)
        if not name.startswith((PACKAGE + "engines/", PACKAGE + "drills/spec.py"))
        for function in public_functions(name)
        if function.args.kwarg
    ]
    report(found, "no **kwargs in a public signature outside engines/")


def test_the_core_is_typed_throughout() -> None:
    found = [
        f"{name}:{node.lineno}"
        for room in ("domain/", "policy/", "core/")
        for name in python_files(PACKAGE + room)
        for node in ast.walk(parsed(name))
        if isinstance(node, (ast.Name, ast.Attribute)) and names_in(node) & {"Any"}
    ]
    report(found, "no Any in domain, policy and core")


def test_every_file_opens_with_a_docstring() -> None:
    found = [name for name in python_files() if not ast.get_docstring(parsed(name))]
    report(found, "every file opens with a docstring")


# The bracketed letters keep this file from holding what it looks for.
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b(?!.*#\d)")
MACHINE = re.compile(
    r"(?<![\w.-])/(ro[o]t|wo[r]k|ho[m]e/\w+|opt/wh[e]els)\b"
    r"|py[p]i\.org/simple|files\.python[h]osted|registry\.np[m]js|deb\.deb[i]an"
)


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for name in project_files():
        try:
            text = source(name)
        except UnicodeDecodeError:
            continue  # not a text
        found += [
            f"{name}:{number} {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    return found


def test_unfinished_work_names_its_issue() -> None:
    report(lines_matching(UNFINISHED), "a note of unfinished work carries its issue's number (#n)")


def test_no_file_names_a_machine() -> None:
    report(lines_matching(MACHINE), "no path of one machine and no host of a package registry")
