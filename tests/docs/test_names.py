"""The documentation matches the code: names, links and messages."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
import mirror.ps
import mirror.testing
from tests.support import fresh
from tests.support.tables import rows

DOCS = fresh.ROOT / "docs"
ABOUT = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mirror/README.md"]
PAGES = {
    name: (fresh.ROOT / name).read_text()
    for name in [*ABOUT, *(str(p.relative_to(fresh.ROOT)) for p in sorted(DOCS.rglob("*.md")))]
}
GUIDE = {name: text for name, text in PAGES.items() if name != "CHANGELOG.md"}
MODULES = [
    "mirror",
    "mirror.config",
    "mirror.debugging",
    "mirror.callbacks",
    "mirror.data",
    "mirror.ps",
]
# Objects that only a method creates have their example there.
MADE_BY = {
    mirror.ProgramReport: mirror.Strategy.inspect,
    mirror.Explanation: mirror.Strategy.explain,
}
WITH_METHODS = [mirror.Strategy, mirror.ReplicaContext, mirror.Variable, mirror.InputContext]


def public() -> dict[str, Any]:
    """Returns the public objects by name; modules are replaced by their contents."""
    return {
        f"{module}.{name}": value
        for module in MODULES
        for name, value in vars(sys.modules[module]).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


PUBLIC = public()


# Names


def test_public_names_have_examples(subtests):
    for name in [n for n, value in PUBLIC.items() if not isinstance(value, str)]:
        with subtests.test(msg=name):
            documented = MADE_BY.get(PUBLIC[name], PUBLIC[name])
            assert examples(documented), f"{name}: add an example to its docstring"


def test_public_methods_appear_in_an_example(subtests):
    """In its own docstring or in the docstring of its class."""
    for owner in WITH_METHODS:
        with subtests.test(msg=owner.__name__):
            for name, method in vars(owner).items():
                if not name.startswith("_") and inspect.isfunction(method):
                    text = examples(owner) + examples(method)
                    assert re.search(rf"\b{name}\(", text), f"{name}: use it in an example"


def examples(documented: object) -> str:
    return "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)", documented.__doc__ or "", re.M))


def test_site_documents_each_public_name_once():
    found = [name for p in PAGES for name in re.findall(r"^::: (mirror\.\S+)", PAGES[p], re.M)]
    assert len(found) == len(set(found)), "a name stands twice"
    there = {id(resolved(name)) for name in found}
    missing = [name for name, value in PUBLIC.items() if id(value) not in there]
    assert not missing, f"add to a page of docs/api: {missing}"


@functools.cache
def resolved(name: str) -> object:
    """Resolves a dotted name to an object or a module."""
    value: object = mirror
    for i, part in enumerate(parts := name.split(".")[1:]):
        if not hasattr(value, part):
            module = ".".join(["mirror", *parts[: i + 1]])
            assert importlib.util.find_spec(module), f"there is no {name}"
            value = importlib.import_module(module)
        else:
            value = getattr(value, part)
    return value


def without_other_library(name: str) -> str:
    """Returns a page; of the tables of a page on another library, only mirror's columns."""
    text = GUIDE[name]
    return re.sub(r"^\| .*? \|", "", text, flags=re.M) if "/from-" in name else text


def test_names_on_a_page_exist(subtests):
    for name in GUIDE:
        with subtests.test(msg=name):
            text = without_other_library(name)
            for found in re.findall(r"`(mirror(?:\.\w+)+)", text):
                resolved(found)
            for attribute in re.findall(r"`strategy\.(\w+)", text):
                owners = (mirror.Strategy, mirror.ps.ParameterServerStrategy)
                assert any(hasattr(o, attribute) for o in owners), f"{name}: strategy.{attribute}"
            for attribute in re.findall(r"`trainer\.(\w+)", text):
                assert hasattr(mirror.Trainer, attribute), f"{name}: trainer.{attribute}"


def test_calls_on_a_page_fit_the_signatures(subtests):
    """Keywords exist, and a call with nothing in its parentheses needs no argument."""
    for name in GUIDE:
        for span in re.findall(r"`(mirror(?:\.\w+)+\([^`]*\))`", without_other_library(name)):
            code = re.sub(r"=(?=[,)])", "=...", " ".join(span.split()))  # `Trainer(wrt=)`
            for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
                function = ast.unparse(call.func)
                if re.fullmatch(r"mirror(\.\w+)+", function):
                    with subtests.test(msg=f"{name}: {span}"):
                        signature = inspect.signature(resolved(function))
                        keywords = {keyword.arg: ... for keyword in call.keywords}
                        bind = signature.bind_partial if call.args or keywords else signature.bind
                        bind(*call.args, **keywords)


def terms(text: str) -> dict[str, str]:
    """Returns the terms of a glossary with their definitions."""
    found = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=^- |\Z)", text, re.M | re.S)
    return {term: " ".join(definition.split()) for term, definition in found}


def test_glossary_agrees_with_the_docstring():
    in_docstring = terms(inspect.getdoc(mirror).split("Glossary:")[1])
    on_page = terms(PAGES["docs/glossary.md"])
    assert len(in_docstring) >= 10
    assert on_page == on_page | in_docstring


def test_code_map_lists_each_module():
    """The public modules, and each module below its folder."""
    text = PAGES["mirror/README.md"]
    package = fresh.ROOT / "mirror"
    for path in package.glob("*.py"):
        assert path.name in text, f"mirror/README.md does not mention {path.name}"
    lines = text.split("  _src/\n")[1].split("```")[0]
    parts = dict(re.findall(r"^    (\w+)/ +((?:.*\n)(?:^ {8}.*\n)*)", lines, re.M))
    for path in (package / "_src").rglob("*.py"):
        folder, *rest = path.relative_to(package / "_src").with_suffix("").parts
        name = f"{rest[0]}/" if len(rest) > 1 else "".join(rest)
        if folder not in ("tools", "__init__") and name != "__init__":
            assert re.search(rf"\b{name}", parts[folder]), f"{folder}: {name}"


# Messages.


@functools.cache
def messages() -> set[str]:
    """Returns every string in the package, with an ellipsis for each placeholder."""
    found = set()
    for path in (fresh.ROOT / "mirror").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in node.values)
                found.add("".join(p if isinstance(p, str) else "…" for p in parts))
    return found


@functools.cache
def said_to_do() -> list[str]:
    """Returns the messages of mirror in the lists of the pages on errors."""
    troubleshooting, _ = PAGES["docs/troubleshooting.md"].split("\n## Messages of JAX")
    pages = (troubleshooting, PAGES["docs/several-machines.md"])
    return [shown for page in pages for shown in re.findall(r"^- `([^`]+)`: ", page, re.M)]


def matches(shown: str, message: str) -> bool:
    """Whether a message has the parts between the ellipses, in order."""
    at = 0
    for part in shown.split("…"):
        found = message.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def test_messages_on_the_pages_of_errors_exist(subtests):
    assert len(said_to_do()) > 80
    for shown in said_to_do():
        with subtests.test(msg=shown):
            assert any(matches(shown, message) for message in messages()), shown


def deleted_array():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x).block_until_ready()
    np.asarray(x)


OTHERS = {
    "JAX": deleted_array,
    "Flax": lambda: nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1)),
}


@rows("library, provoke", [*OTHERS.items()])
def test_messages_of_other_libraries_are_current(library, provoke):
    items = re.findall(rf"^- `+(.*?)`+ \({library}\): ", PAGES["docs/troubleshooting.md"], re.M)
    with pytest.raises((RuntimeError, TypeError)) as caught:
        provoke()
    assert any(matches(shown, str(caught.value)) for shown in items)


# Pages and links.


def test_pages_are_finished(subtests):
    for name in PAGES:
        with subtests.test(msg=name):
            text = PAGES[name]
            assert text.startswith("# "), "a page begins with its title"
            assert len(text.split()) > 20 or "\n::: " in text, "a page says something"
            assert not re.search(r"\b(TODO|TBD|FIXME|lorem)\b", text), "a page is finished"


def test_links_of_a_page_resolve(subtests):
    """Links to other pages; `test_links.py` checks the others."""
    for name in PAGES:
        with subtests.test(msg=name):
            prose = re.sub(r"```.*?```", "", PAGES[name], flags=re.S)
            for target in re.findall(r"\]\((?!https:)([^)]+)\)", prose):
                file, _, anchor = target.partition("#")
                path = ((fresh.ROOT / name).parent / file).resolve() if file else fresh.ROOT / name
                assert path.is_file(), f"{name} links {target}"
                if anchor:
                    heads = re.findall(r"^#+ (.*)", path.read_text(), re.M)
                    assert anchor in map(anchor_of, heads), f"{name} links {target}"


def anchor_of(heading: str) -> str:
    """Returns the anchor of a heading, as on GitHub and in MkDocs."""
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def test_pages_are_in_the_navigation():
    navigation = (fresh.ROOT / "mkdocs.yml").read_text()
    for path in DOCS.rglob("*.md"):
        assert str(path.relative_to(DOCS)) in navigation, path
