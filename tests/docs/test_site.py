"""The documentation site: `docs/build.py`, which Zensical follows."""

import re
import subprocess
import sys
from typing import Any

import nbformat
import pytest

from tests.support import fresh

BUILD = fresh.ROOT / "docs" / "build.py"
needs_site = pytest.mark.dev("zensical", "mkdocstrings")


@pytest.fixture(scope="module")
def build() -> Any:
    """The module `docs/build.py`."""
    return fresh.module_of(BUILD)


def test_pages_outside_docs_are_in_the_navigation(build):
    navigation = (fresh.ROOT / "mkdocs.yml").read_text()
    for page, file in build.PAGES.items():
        assert (fresh.ROOT / file).is_file()
        assert re.search(rf"{page}$", navigation, re.M), page
    assert sum(page.startswith("notebooks/") for page in build.PAGES) == 9


LINKS = {
    # page of the site: a link in its file, the link on the site
    "index.md": ("docs/steps.md#keys", "steps.md#keys"),
    "steps.md": ("../benchmarks/README.md", "benchmarks.md"),
    "api/data.md": ("../data.md", "../data.md"),
    "code.md": ("../CONTRIBUTING.md", "contributing.md"),
    "benchmarks.md": ("runs/x.png", "benchmarks/runs/x.png"),
    "notebooks/01_quickstart.md": (
        "02_devices_and_placement.ipynb",
        "02_devices_and_placement.md",
    ),
    "notebooks/02_devices_and_placement.md": ("../docs/devices.md", "../devices.md"),
}


def test_links_lead_to_pages_of_the_site(subtests, build):
    for page in LINKS:
        with subtests.test(msg=page):
            link, wanted = LINKS[page]
            assert build.on_site(f"[text]({link})", page) == f"[text]({wanted})"


def test_links_to_tests_become_paths(build):
    text = build.on_site("Held ([a law](../tests/laws/test_laws.py)).", "steps.md")
    assert text == "Held (a law: `tests/laws/test_laws.py`)."


def test_text_after_code_is_titled_output(build):
    for language in ("python", "sh"):
        ran = f"```{language}\nprint(1)\n```\n\n```text\n1\n```\n"
        assert build.on_site(ran, "steps.md") == ran.replace("```text", '```text title="Output"')
    other = "```python\nprint(1)\n```\n\nThe log:\n\n```text\n1\n```\n"
    assert build.on_site(other, "steps.md") == other
    varies = "```python\n1\n```\n```text numbers-vary\n1\n```\n"
    titled = varies.replace(" numbers-vary", ' title="Output"')
    assert build.on_site(varies, "steps.md") == titled
    both = "```python\n1\n```\n```text stderr\nepoch 1/1\n```\n```text\n1\n```\n"
    titled = both.replace("```text\n", '```text title="Output"\n')
    titled = titled.replace("text stderr", 'text title="Progress"')
    assert build.on_site(both, "steps.md") == titled
    for language in ("python", "text"):
        plain = f"```{language}\n1\n```\n"
        assert build.on_site(plain.replace("\n1", " no-run\n1"), "steps.md") == plain


def test_cells_are_shown_with_their_results(build, tmp_path):
    (tmp_path / "notebooks").mkdir()
    new = nbformat.v4
    cells = [
        new.new_markdown_cell("# Title", id="title"),
        new.new_code_cell(
            "x",
            id="code",
            outputs=[
                new.new_output("stream", name="stdout", text="done\nnext\n"),
                new.new_output("display_data", {"text/html": "<p>\n\nrow</p>", "text/plain": "-"}),
                new.new_output("display_data", {"image/png": "AAAA", "text/plain": "-"}),
                new.new_output("execute_result", {"text/plain": "7"}, execution_count=1),
            ],
        ),
    ]
    notebook = new.new_notebook(cells=cells)
    nbformat.write(notebook, tmp_path / "shown.ipynb")
    text = build.markdown_of(tmp_path / "shown.ipynb", tmp_path)
    printed, result = (
        '```text title="Output"\n' + shown + "\n```" for shown in ("done\nnext", "7")
    )
    assert text.split("\n\n") == [
        *("# Title", "```python\nx\n```", printed),
        *("<div>\n<p>\nrow</p>\n</div>", "![Output](shown-code.png)", result + "\n"),
    ]
    assert (tmp_path / "notebooks" / "shown-code.png").read_bytes() == b"\0\0\0"


ADDRESSES = {
    "none": ("", {}),
    "some": (
        '[project.urls]\nRepository = "https://host/repo"\nDocumentation = "https://host/docs"',
        {"repo_url": "https://host/repo", "site_url": "https://host/docs"},
    ),
}


def test_public_addresses_come_from_pyproject(subtests, build, tmp_path_factory):
    for name in ADDRESSES:
        with subtests.test(msg=name), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = tmp_path_factory.mktemp("row")
            urls, wanted = ADDRESSES[name]
            (tmp_path / "pyproject.toml").write_text(f"[project]\n{urls}\n")
            (tmp_path / "mkdocs.yml").write_text((fresh.ROOT / "mkdocs.yml").read_text())
            monkeypatch.setattr(build, "ROOT", tmp_path)
            settings = build.settings()
            keys = settings.keys() & {"repo_url", "site_url"}
            assert {key: settings[key] for key in keys} == wanted


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built without results of notebooks; warnings about links and names are errors."""
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def built(folder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BUILD), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@needs_site
@pytest.mark.slow
def test_site_has_every_page(site, build):
    for page in ["troubleshooting.md", "api/training.md", *build.PAGES]:
        path = site / page.removesuffix(".md") / "index.html"
        assert (site / "index.html" if page == "index.md" else path).is_file(), page


@needs_site
@pytest.mark.slow
def test_signatures_have_types(site):
    text = re.sub(r"<[^>]*>", "", (site / "api" / "strategies" / "index.html").read_text())
    assert "replicas_per_device: int = 1" in text
    assert re.search(r"all_gather\(.*?\) -&gt; ", text, re.S)


@needs_site
@pytest.mark.slow
def test_outputs_and_examples_are_rendered(site):
    assert ">Output<" in (site / "data" / "index.html").read_text()
    assert 'class="gp"' in (site / "api" / "values" / "index.html").read_text()


@needs_site
@pytest.mark.slow
def test_home_page_shows_a_picture(site):
    text = (site / "index.html").read_text()
    (picture,) = re.findall(r'src="([^"]*first_screen\.svg)"', text)
    assert (site / picture).is_file()


@needs_site
@pytest.mark.slow
def test_pictures_of_the_site_exist(site):
    for page in site.rglob("index.html"):
        for source in re.findall(r'<img[^>]* src="([^":]+)"', page.read_text()):
            assert (page.parent / source).is_file(), f"{page.relative_to(site)}: {source}"


MISTAKES = {
    "page": ("data.md", "[a page](nowhere.md)"),
    "anchor": ("data.md", "[a heading](steps.md#nowhere)"),
    "name": ("api/data.md", "::: mirror.nowhere"),
}


@needs_site
@pytest.mark.nightly
def test_mistakes_in_pages_are_errors(subtests, build, tmp_path_factory):
    for name in MISTAKES:
        with subtests.test(msg=name):
            tmp_path = tmp_path_factory.mktemp("row")
            page, mistake = MISTAKES[name]
            config = build.stage(tmp_path)
            path = tmp_path / "pages" / page
            path.write_text(f"{path.read_text()}\n\n{mistake}\n")
            command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(config)]
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode != 0
            plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
            assert "nowhere" in plain
