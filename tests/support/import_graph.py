"""The import graph of the package, and the diagram of it in the code map.

Example:

    python -m tests.support.import_graph --write  # updates mirror/README.md
"""

import ast
import functools
import io
import sys
import tokenize
from typing import NamedTuple

from tests.support import fresh

PACKAGE = fresh.ROOT / "mirror"
MAP = PACKAGE / "README.md"
BEGIN, END = "<!-- imports: begin -->\n", "<!-- imports: end -->\n"

# Bottom first. A folder imports only folders that precede it.
FOLDERS = [
    *("base", "devices", "cluster", "jaxprs", "passes", "engine", "inspection", "data", "keras"),
    *("strategy", "training", "ps", "tools"),
]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Returns the syntax trees of all modules, by their names without `mirror.`."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        trees[name.removesuffix("__init__").removesuffix(".")] = ast.parse(path.read_text())
    return trees


def folder_of(name: str) -> str:
    """Returns the folder of a module below `mirror/_src`, and "" for all other modules."""
    return name.split(".")[1] if name.startswith("_src.") else ""


def imports_of(tree: ast.Module, *, at_run_time: bool = False) -> set[str]:
    """Returns the modules of the package that a module imports, also inside functions.

    Args:
        tree: The module.
        at_run_time: Whether to leave out what only type checkers import.
    """
    names: set[str] = set()
    ignored = {n for each in tree.body if _is_for_types(each) for n in ast.walk(each)}
    for node in ast.walk(tree):
        if at_run_time and node in ignored:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
    known = modules()
    inside = {n.removeprefix("mirror").lstrip(".") for n in names if n.split(".")[0] == "mirror"}
    # `from mirror import calls` imports a module of the package, not the package itself.
    return {n for n in inside if n in known and (n or inside == {""})}


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


class Size(NamedTuple):
    """Size of a room."""

    code_lines: int
    modules: int
    classes: int


def size_of(folder: str) -> Size:
    """Returns the size of a room, without blank lines, comments, docstrings and imports."""
    trees = {name: tree for name, tree in modules().items() if folder_of(name) == folder}
    files = list((PACKAGE / "_src" / folder).rglob("*.py"))
    classes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    num_modules = sum(file.name != "__init__.py" for file in files)
    return Size(
        sum(len(_code_lines(file.read_text())) for file in files), num_modules, len(classes)
    )


def _code_lines(source: str) -> set[int]:
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*layout, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            is_text and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def folder_imports() -> dict[str, set[str]]:
    """Returns the other folders that each folder imports."""
    graph: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for name, tree in modules().items():
        if folder := folder_of(name):
            graph[folder] |= {folder_of(target) for target in imports_of(tree)} - {"", folder}
    return graph


def diagram() -> str:
    """Draws the folders from top to bottom, each with its imports.

    An import that another import implies is omitted: `cli -> training` implies `cli -> utils`.
    """
    graph = folder_imports()
    reachable: dict[str, set[str]] = {}
    for folder in FOLDERS:
        reachable[folder] = graph[folder].union(*(reachable[target] for target in graph[folder]))
    lines = []
    for folder in reversed(FOLDERS):
        implied = set().union(*(reachable[target] for target in graph[folder]))
        direct = [f for f in reversed(FOLDERS) if f in graph[folder] - implied]
        lines.append(f"{folder:<12} -> {', '.join(direct)}" if direct else folder)
    return "```\n" + "\n".join(lines) + "\n```\n"


def parts_of_map() -> tuple[str, str, str]:
    """Returns the text of mirror/README.md before the diagram, the diagram, and the text after."""
    before, _, rest = MAP.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    return before, shown, after


if __name__ == "__main__":
    print(diagram(), end="")
    if "--write" in sys.argv[1:]:
        before, _, after = parts_of_map()
        MAP.write_text(before + BEGIN + diagram() + END + after)
