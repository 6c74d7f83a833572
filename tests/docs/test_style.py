"""The English of messages, docstrings, comments and pages avoids a list of phrases."""

import ast
import io
import json
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import fresh


class Rule(NamedTuple):
    """A phrase that is banned, what to do instead, and the kinds of text it applies to."""

    pattern: re.Pattern[str]
    instead: str
    kinds: tuple[str, ...] = ("message", "docstring", "comment", "page")


def rule(pattern: str, instead: str, **kinds: tuple[str, ...]) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), instead, **kinds)


_VERBS = (
    "author|categor|character|custom|emphas|equal|factor|final|general|initial|local|material|"
    "maxim|memor|minim|normal|optim|organ|parallel|penal|prior|quant|random|real|recogn|regular|"
    "serial|special|stabil|standard|summar|symbol|synchron|token|util|vector|visual"
)
RULES = [
    # "There is no such device" is plain English; "3 is no device" and "there is none" are not.
    rule(r"(?<!\bthere )\b(is|are) no(?! longer\b)\b", 'write "is not a", "does not", "cannot"'),
    rule(r"\b(is|are) (?-i:none)\b", "repeat the noun"),
    rule(r"\bfor ever\b", 'write "forever"'),
    rule(r"\b(anew|afresh)\b", 'write "again", or a verb with "re-"'),
    rule(r"\b(gives?|gave|given|giving) up\b", 'write "donate" (of a buffer), "stop", "release"'),
    rule(r"\b(go|goes|going|gone|went) on\b", 'write "continue", "resume"'),
    rule(r"\bby (itself|themselves)\b", 'write "automatically", or omit it', kinds=("message",)),
    rule(r"\btalk(s|ed|ing)?\b", 'write "collective", "communicate"'),
    rule(r"\bmend(s|ed|ing)?\b", 'write "fix"'),
    rule(r"\bnobody\b", "name who, or use the passive voice"),
    rule(r"\b(that|those) of\b", "repeat the noun"),
    rule(r"\bso many\b", "name the number"),
    rule(r"\bin silence\b", 'write "silently"'),
    rule(r"\bshall\b", 'write "must", "will"'),
    rule(r", say[,.):]", 'write "for example"'),
    rule(
        r"\b(usually|typically|half the time|(many|several|much|\w+ times) (times )?"
        r"(faster|slower))\b",
        "give the measurement or its page, or omit the claim",
        kinds=("message", "docstring", "page"),
    ),
    rule(
        r"\A(what|who|how|where|of|the same)\b",
        'start with a verb in the third person ("Returns"), or with a noun',
        kinds=("docstring",),
    ),
    rule(rf"\b\w*({_VERBS})(is|it?is)(ations?|e|ed|ers?|es|ing)\b", 'write "-ize", "-ization"'),
    rule(
        r"\b(artefact|behaviour|cancelled(?!error)|cancelling|centre|colour|favour|grey|honour|labelled|"
        r"labelling|licence|modelling|neighbour|travelled|travelling|amongst|whilst)\w*\b",
        "use American spelling",
    ),
]
# A phrase that must stay: the end of the file's path, its words with some around them; the reason.
_TF = "the name of the error in TensorFlow and Python"
ALLOWED: dict[tuple[str, str], str] = {
    ("ps/handles.py", "CancelledError"): _TF,
    ("parameter-server.md", "CancelledError"): _TF,
    ("api/errors.md", "CancelledError"): _TF,
}
# Code in prose: fenced blocks, spans between backticks, and lines of a doctest.
_CODE = re.compile(
    r"^ *```.*?^ *```|``[^`]*``|`[^`]*`|^ *(?:>>>|\.\.\.) [^\n]*$", re.DOTALL | re.MULTILINE
)


class Text(NamedTuple):
    """A piece of prose, and the number of its first line."""

    kind: str
    line: int
    text: str


def without_code(text: str) -> str:
    """Blanks out code, and keeps the number of lines."""
    return _CODE.sub(lambda code: "`" + "\n" * code[0].count("\n") + "`", text)


def texts_of_python(source: str) -> Iterator[Text]:
    """Yields every docstring, string constant and comment of a module."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) and isinstance(first, ast.Expr):
                docstrings.add(first.value)
    yield from strings_of(tree, docstrings)
    comment: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != comment[0][0] + len(comment):
                yield joined(comment)
                comment = []
            comment.append((token.start[0], token.string.lstrip("#: ")))
    if comment:
        yield joined(comment)


def strings_of(node: ast.AST, docstrings: set[ast.expr]) -> Iterator[Text]:
    """Yields the docstrings and messages below a node; an f-string is one text."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        yield Text("message", node.lineno, "".join(map(str, parts)))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            kind = "docstring" if node in docstrings else "message"
            yield Text(kind, node.lineno, node.value)
        return
    for child in ast.iter_child_nodes(node):
        is_part = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
        if not is_part:
            yield from strings_of(child, docstrings)


def texts_of_toml(source: str) -> Iterator[Text]:
    """Yields the texts of the commands and of their options."""
    for table in tomllib.loads(source).values():
        for option in (table, *table.get("options", {}).values()):
            for name in ("summary", "text", "end", "help"):
                text = option.get(name, "")
                yield Text("message", source.count("\n", 0, source.find(text[:20])) + 1, text)


def joined(comment: list[tuple[int, str]]) -> Text:
    return Text("comment", comment[0][0], "\n".join(line for _, line in comment))


def texts_of_page(name: str, source: str) -> Iterator[Text]:
    """Yields a page; of the changelog, what has not been released."""
    if name == "CHANGELOG.md":
        sections = re.split(r"^(?=## )", source, flags=re.M)
        source = "".join(sections[:2])
    yield Text("page", 1, source)


def texts_of_notebook(source: str) -> Iterator[Text]:
    """Yields the Markdown cells, with the lines that they have in the file."""
    start = 0
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            first = json.dumps(cell["source"][0], ensure_ascii=False) if cell["source"] else ""
            start = max(source.find(first, start), 0)
            yield Text("page", source.count("\n", 0, start) + 1, text)


def prose() -> dict[str, Path]:
    """The files of the package and its documentation, by their names."""
    root = fresh.ROOT
    files = [*(root / "mirror").rglob("*.py"), *(root / "mirror").rglob("*.toml")]
    files += [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "mirror").rglob("*.md")]
    files += [*(root / "benchmarks").rglob("*.md"), *(root / "notebooks").glob("*.ipynb")]
    return {str(path.relative_to(root)): path for path in sorted(files)}


FILES = prose()


def texts_of(name: str) -> list[Text]:
    source = FILES[name].read_text()
    if name.endswith(".py"):
        return list(texts_of_python(source))
    if name.endswith(".toml"):
        return list(texts_of_toml(source))
    return list(
        texts_of_notebook(source) if name.endswith(".ipynb") else texts_of_page(name, source)
    )


def violations(name: str, texts: list[Text]) -> Iterator[str]:
    """Yields a line for each banned phrase: where it is, what to do instead, its context."""
    for kind, line, raw in texts:
        text = without_code(raw)
        for pattern, instead, kinds in RULES:
            for match in pattern.finditer(text) if kind in kinds else ():
                number = text.count("\n", 0, match.start())
                context = " ".join(text[max(match.start() - 40, 0) : match.end() + 40].split())
                if not is_allowed(name, context):
                    yield f'{name}:{line + number}: "{match[0]}" in a {kind}; {instead}: {context}'


def is_allowed(name: str, context: str) -> bool:
    return any(name.endswith(path) and words in context for path, words in ALLOWED)


def test_prose_avoids_banned_phrases(subtests):
    for name in FILES:
        with subtests.test(msg=name):
            lines = list(violations(name, texts_of(name)))
            assert not lines, "\n" + "\n".join(lines)


def test_allowed_phrases_are_in_use():
    for path, words in ALLOWED:
        files = [file.read_text() for name, file in FILES.items() if name.endswith(path)]
        assert any(words in text for text in files), f"{path} has no {words!r}"


SAMPLE = '''
"""What a module is."""

def f(x):
    """Returns `what is no number`, and `anew`."""
    # The run goes on
    # for ever.
    raise ValueError(f"{x} is no number, "
                     "and nobody knows.")
'''


def test_rules_find_banned_phrases():
    lines = list(violations("sample.py", list(texts_of_python(SAMPLE))))
    phrases = [(int(line.split(":")[1]), re.findall('"([^"]*)"', line)[0]) for line in lines]
    expected = [(2, "What"), (6, "goes on"), (7, "for ever"), (8, "is no"), (8, "nobody")]
    assert sorted(phrases) == expected
    plain = "It is no longer used. There is no such device. The default is None."
    assert not list(violations("sample.py", [Text("message", 1, plain)]))
    british = "initialised normalisation behaviour synchronised prioritise"
    assert len(list(violations("sample.py", [Text("page", 1, british)]))) == 5
    american = "otherwise raise precise promised advised comprises supervised realistic"
    assert not list(violations("sample.py", [Text("page", 1, american)]))
