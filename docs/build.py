"""Builds the documentation site.

    python docs/build.py site

It copies the pages, the README and the notebooks to a temporary folder, with links between pages of
the site, and runs Zensical there with the settings of `mkdocs.yml`. Zensical has no hooks and no
plugin for notebooks; a program before it does not need any.
"""

import argparse
import base64
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Pages that are stored outside `docs/`.
PAGES = {
    "index.md": "README.md",
    "code.md": "mirror/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    **{f"notebooks/{path.stem}.md": f"notebooks/{path.name}" for path in NOTEBOOKS},
}
_SITE = {file: page for page, file in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=(?:#[^)]*)?\))")
_TEST = re.compile(r"\[([^\]]+)\]\((?:\.\./)*(tests/[^)]+)\)")
_OUTPUT = re.compile(r"(^```(?:python|sh)\n.*?^```\n\n?```text)(?: numbers-vary)?$", re.M | re.S)
_OPTION = re.compile(r"^(```(?:python|text)) no-run$", re.M)


def stage(folder: Path) -> Path:
    """Writes the pages and the settings of the site to a folder; returns the settings' file."""
    pages = folder / "pages"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for picture in (ROOT / "benchmarks").rglob("*.png"):
        target = pages / picture.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    for page, file in PAGES.items():
        source, target = ROOT / file, pages / page
        target.parent.mkdir(exist_ok=True)
        is_notebook = source.suffix == ".ipynb"
        text = markdown_of(source, pages) if is_notebook else source.read_text(encoding="utf-8")
        target.write_text(text, encoding="utf-8")
    for path in pages.rglob("*.md"):
        page = path.relative_to(pages).as_posix()
        path.write_text(on_site(path.read_text(encoding="utf-8"), page), encoding="utf-8")
    config = folder / "mkdocs.yml"
    config.write_text(yaml.safe_dump(settings(), sort_keys=False), encoding="utf-8")
    return config


def settings() -> dict[str, Any]:
    """Returns the settings of mkdocs.yml, with absolute paths and the public addresses, if any."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": "pages", "site_dir": "site"}
    (handlers,) = [plugin["mkdocstrings"] for plugin in config["plugins"] if plugin != "search"]
    python = handlers["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    python["options"]["extensions"] = [str(ROOT / "docs" / "examples.py")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = project.get("urls", {})
    if "Repository" in urls:
        config["repo_url"] = urls["Repository"]
    if "Documentation" in urls:
        config["site_url"] = urls["Documentation"]
    return config


def on_site(text: str, page: str) -> str:
    """Returns the text of a page with links to pages of the site, and with titles of outputs.

    Tests are not on the site: a link to one becomes its path.
    """
    folder = posixpath.dirname(PAGES.get(page, f"docs/{page}"))

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        site_path = _SITE.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(site_path, posixpath.dirname(page) or ".")

    text = text if page.startswith("notebooks/") else _OUTPUT.sub(r'\1 title="Output"', text)
    text = text.replace("```text stderr", '```text title="Progress"')
    return _OPTION.sub(r"\1", _LINK.sub(link, _TEST.sub(r"\1: `\2`", text)))


def markdown_of(path: Path, pages: Path) -> str:
    """Returns a notebook and its stored results as Markdown, and writes its pictures."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_shown(output, f"{path.stem}-{cell.id}", pages) for output in cell.outputs]
    return "\n\n".join(filter(None, parts)) + "\n"


def _shown(output: Any, name: str, pages: Path) -> str:
    """Returns what a cell printed or displayed, as Markdown."""
    if output.output_type == "stream":
        return _fenced(output.text.rstrip())
    data = output.get("data", {})
    if "image/png" in data:
        (pages / "notebooks" / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
        return f"![Output]({name}.png)"
    if "text/html" in data:  # without empty lines, which end a block of HTML
        return re.sub(r"\n\s*\n", "\n", f"<div>\n{data['text/html']}\n</div>")
    return _fenced(data.get("text/plain", ""))


def _fenced(text: str) -> str:
    return f'```text title="Output"\n{text}\n```' if text else ""


def main() -> None:
    """Builds the site; warnings about links and names are errors."""
    parser = argparse.ArgumentParser(description="Builds the documentation site.")
    parser.add_argument("site", type=Path, help="folder to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = stage(Path(folder))
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(config)]
        if status := subprocess.run(command, check=False, cwd=folder).returncode:
            sys.exit(status)
        shutil.copytree(Path(folder) / "site", options.site, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
