"""What the code of the tests does: who looks inside the package, compares clocks, or sleeps."""

import ast
import contextlib
import functools
import re
import textwrap

from tests.support import fresh

TESTS = fresh.ROOT / "tests"
CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "time_ns", "monotonic_ns"}
_IMPORT = re.compile(r"\b(from|import) mirror\._src\b")
_NAME = re.compile(r"mirror\._src\.[\w.]*")  # for `monkeypatch.setattr`


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """Returns each file of the tests, relative to their folder, and its syntax tree."""
    return [
        (path.relative_to(TESTS).as_posix(), ast.parse(path.read_text()))
        for path in sorted(TESTS.rglob("*.py"))
    ]


def looks_inside(tree: ast.AST) -> bool:
    """Whether code imports or names a module of `mirror._src`, also in the text of a program."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                named = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                named = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Attribute(value=ast.Name(id="mirror"), attr="_src"):
                return True
            case ast.Constant(value=str(text)) if _IMPORT.search(text) or _NAME.fullmatch(text):
                return True
            case _:
                continue
        if any(re.match(r"mirror\._src\b", name) for name in named):
            return True
    return False


def clock_asserts(tree: ast.AST) -> list[int]:
    """Returns the lines of asserts that compare a time, also in the texts of programs."""
    lines = []
    for scope in _outermost_functions(tree):
        timed = _timed_names(scope)
        for node in ast.walk(scope):
            if isinstance(node, ast.Assert) and _compares_time(node.test, timed):
                lines.append(node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "time" in node.value:
            with contextlib.suppress(SyntaxError, ValueError):
                if clock_asserts(ast.parse(textwrap.dedent(node.value))):
                    lines.append(node.lineno)
    return sorted(set(lines))


def sleeps(tree: ast.AST) -> bool:
    """Whether code calls `time.sleep`; the text of a program is another process, and may."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")):
                return True
            case ast.Call(func=ast.Name(id="sleep")):
                return True
    return False


def _outermost_functions(tree: ast.AST) -> list[ast.AST]:
    """Returns the functions outside of functions, and the rest of the module as one more."""
    found: list[ast.AST] = []
    rest: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found.append(node)
        elif isinstance(node, ast.ClassDef):
            found += _outermost_functions(node)
        elif isinstance(node, ast.stmt):
            rest.append(node)
    return [*found, ast.Module(rest, [])]


def _timed_names(scope: ast.AST) -> set[str]:
    """Returns the names that are bound from a clock, directly or from such a name."""
    names: set[str] = set()
    while True:
        more: set[str] = set()
        for node in ast.walk(scope):
            match node:
                case ast.Assign(targets=targets, value=value) if _has_time(value, names):
                    more |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                case ast.NamedExpr(target=ast.Name(id=name), value=value) if _has_time(
                    value, names
                ):
                    more.add(name)
        if more <= names:
            return names
        names |= more


def _has_time(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression computes with a time; a call that only gets a deadline does not."""
    if isinstance(node, ast.Call):
        if _is_clock(node.func):
            return True
        if ast.unparse(node.func) not in ("abs", "float", "int", "max", "min", "round", "sum"):
            return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(_has_time(child, names) for child in ast.iter_child_nodes(node))


def _is_clock(function: ast.expr) -> bool:
    module, _, name = ast.unparse(function).rpartition(".")
    return name in CLOCKS and (module == "time" or (not module and name != "time"))


def _compares_time(test: ast.expr, names: set[str]) -> bool:
    """Whether a comparison has a time on one side."""
    return any(
        isinstance(node, ast.Compare)
        and any(_has_time(side, names) for side in (node.left, *node.comparators))
        for node in ast.walk(test)
    )
