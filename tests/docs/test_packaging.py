"""The package as users install it: requirements, metadata, and the wheel alone."""

import ast
import functools
import importlib.metadata
import json
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mirror
from tests.support import fresh
from tests.support.pages import PAGES, blocks

PROJECT = tomllib.loads((fresh.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
README = (fresh.ROOT / "README.md").read_text()
EXTERNAL = re.findall(r"\]\((https:[^)]*)\)", README)
NAME = PROJECT["name"]
TOO_LARGE = (
    r"torch|tensorflow.*|keras|datasets|ray|mkdocs.*|zensical|basedpyright|nvidia-.*|jax-cuda.*"
)


# Requirements


def requirements(extra: str) -> list[Requirement]:
    """Returns the requirements of an extra, of which extras of this project are resolved."""
    found = []
    for requirement in map(Requirement, EXTRAS[extra]):
        if canonicalize_name(requirement.name) == NAME:
            found += [other for name in requirement.extras for other in requirements(name)]
        else:
            found.append(requirement)
    return found


def closure(wanted: list[Requirement]) -> dict[str, str]:
    """Returns the distributions that are installed, each with the one that requires it."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    rest = [(requirement, NAME) for requirement in wanted]
    while rest:
        requirement, parent = rest.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, parent)
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in importlib.metadata.requires(name) or ():
                child = Requirement(line)
                if child.marker is None or child.marker.evaluate({"extra": extra}):
                    rest.append((child, name))
    return found


@functools.cache
def of_test_command() -> dict[str, str]:
    return closure([*map(Requirement, PROJECT["dependencies"]), *requirements("test")])


def test_test_command_installs_nothing_large():
    large = {name: parent for name, parent in of_test_command().items() if is_large(name)}
    assert not large, f"required by: {large}"
    assert {"jaxlib", "scikit-learn", "pytest", "scipy", "matplotlib"} <= of_test_command().keys()


def is_large(name: str) -> bool:
    return re.fullmatch(TOO_LARGE, name) is not None


def test_large_packages_are_recognized():
    packages = [r.name for r in requirements("dev")]
    large = {"torch", "datasets", "keras", "ray", "zensical", "mkdocstrings", "basedpyright"}
    assert {name for name in packages if is_large(name)} == large
    assert is_large("nvidia-cublas-cu12")
    assert is_large("tensorflow-cpu")


def test_dev_contains_the_other_extras_for_development():
    names = {r.name for r in requirements("dev")}
    for extra in ("test", "docs", "interop", "keras", "demo"):
        assert {r.name for r in requirements(extra)} <= names
    (exact,) = [r for r in requirements("dev") if str(r.specifier).startswith("==")]
    assert exact.name == "torch"
    users = [r for extra in ("train", "interop", "keras", "demo") for r in requirements(extra)]
    assert all(str(r.specifier).startswith(">=") for r in users)


def test_marks_name_packages_of_dev():
    names = {canonicalize_name(r.name) for r in requirements("dev")}
    names = {name.removeprefix("google-") for name in names}  # marks name modules
    marked = set()
    for path in (fresh.ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "dev":
                marked |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    assert {"torch", "zensical"} <= marked
    assert {canonicalize_name(name) for name in marked} <= names


@pytest.mark.slow
def test_dev_tests_fail_with_the_option_and_are_skipped_without(tmp_path):
    """A package that is not installed is never an error, except with `--dev`."""
    module = fresh.ROOT / "tests" / "docs" / "test_packaging.py"
    hidden = "import importlib.util as u; find = u.find_spec; "
    hidden += (
        "u.find_spec = lambda name, *a: None if name == 'readme_renderer' else find(name, *a); "
    )
    hidden += "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", hidden, *("-q", "-n", "0", "-p", "no:cacheprovider")]
    command += [f"{module}::test_long_description_renders_on_a_package_index"]
    skipped = subprocess.run(command, cwd=fresh.ROOT, capture_output=True, text=True, check=False)
    assert skipped.returncode == 0, skipped.stdout + skipped.stderr
    assert 'needs readme_renderer: pip install -e ".[dev]"' in skipped.stdout
    failed = subprocess.run(
        [*command, "--dev"], cwd=fresh.ROOT, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert 'needs readme_renderer: pip install -e ".[dev]"' in failed.stdout


# Metadata


def test_python_versions_agree():
    """In the classifiers, README.md, CONTRIBUTING.md and `.ci/run`."""
    name = "Programming Language :: Python :: "
    listed = [c.removeprefix(name) for c in PROJECT["classifiers"] if c.startswith(name)]
    first, *_, last = listed
    assert listed == [f"3.{minor}" for minor in range(11, 11 + len(listed))]
    assert PROJECT["requires-python"] == f">={first}"
    assert f"Python {first} to {last}" in README
    assert f"Python {first} to {last}" in (fresh.ROOT / "CONTRIBUTING.md").read_text()
    assert f"for version in {' '.join(listed)};" in (fresh.ROOT / ".ci" / "run").read_text()


def test_old_python_ends_the_installation_with_a_sentence():
    require_python, first = setup()["require_python"], PROJECT["requires-python"].strip(">=")
    require_python(tuple(map(int, first.split("."))))
    with pytest.raises(SystemExit) as caught:
        require_python((3, int(first.split(".")[1]) - 1))
    assert f"Python {first}" in str(caught.value)


def test_version_has_an_entry_in_the_changelog():
    changelog = (fresh.ROOT / "CHANGELOG.md").read_text()
    first, second, *_ = re.findall(r"^## (.*)", changelog, re.M)
    assert first == "Unreleased"
    assert re.fullmatch(rf"{re.escape(mirror.__version__)} \(\d{{4}}-\d\d-\d\d\)", second)


@functools.cache
def setup():
    return runpy.run_path(str(fresh.ROOT / "setup.py"))


DESCRIPTIONS = {
    # public address of the repository: the targets of links and pictures that are left
    "none": (None, r"$^"),
    "some": ("https://host/repo/", r"https://host/repo/(blob|raw)/main/\S+"),
}


def test_links_of_the_long_description_lead_somewhere(subtests):
    for name in DESCRIPTIONS:
        with subtests.test(msg=name):
            repository, wanted = DESCRIPTIONS[name]
            text = setup()["long_description"](README, repository)
            targets = [t for t in re.findall(r"\]\(([^)]*)\)", text) if t not in EXTERNAL]
            assert all(re.fullmatch(wanted, target) for target in targets)
            links = README.count("](") - len(EXTERNAL)
            assert len(targets) == (0 if repository is None else links)
            picture = "](https://host/repo/raw/main/docs/first_screen.svg)"
            assert (picture in text) == (repository is not None)
            for target in targets:
                path = re.sub(r".*/main/", "", target).partition("#")[0]
                assert (fresh.ROOT / path).is_file(), target


@pytest.mark.dev("readme_renderer")
def test_long_description_renders_on_a_package_index(subtests):
    from readme_renderer import markdown

    for name in DESCRIPTIONS:
        with subtests.test(msg=name):
            repository, _ = DESCRIPTIONS[name]
            html = markdown.render(setup()["long_description"](README, repository))
            assert html is not None
            assert "<table>" in html
            not_of_headings = r'(?:href|src)="(?!#user-content-)([^"]*)"'
            targets = [t for t in re.findall(not_of_headings, html) if t not in EXTERNAL]
            assert all(target.startswith("https://host/repo/") for target in targets)
            assert bool(targets) == (repository is not None)


# The wheel


def output_of(command: list[str], folder: Path, **environment: str) -> str:
    """Runs a command outside the checkout; returns what it prints."""
    inherited = {k: v for k, v in fresh.INHERITED.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}"
    return done.stdout


def build(kind: str, folder: Path) -> Path:
    """Builds a distribution of a copy of the checkout; returns its file."""
    source = folder / "source"
    skip = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(fresh.ROOT, source, ignore=skip)
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}"]
    output_of([*command, "--outdir", str(folder / "dist"), str(source)], folder)
    (file,) = (folder / "dist").iterdir()
    return file


@pytest.mark.dev("build", "setuptools")
@pytest.mark.nightly
def test_source_distribution_builds(tmp_path):
    file = build("sdist", tmp_path)
    assert file.name == f"mirror_jax-{mirror.__version__}.tar.gz"
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
    shutil.unpack_archive(file, tmp_path / "unpacked", **safely)
    (folder,) = (tmp_path / "unpacked").iterdir()
    for name in ("setup.py", "README.md", "LICENSE", "mirror/py.typed"):
        assert (folder / name).is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel, and with the other packages of this one.

    A `.pth` file adds the packages of this environment after its own, so that `import mirror` finds
    the wheel even if this environment has mirror, too; nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(output_of(ask, folder).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    others = [path for path in sys.path if "site-packages" in path]
    (packages / "others.pth").write_text("\n".join(others))
    return python


@pytest.mark.dev("build", "setuptools")
@pytest.mark.slow
def test_wheel_contains_the_packages_and_their_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"mirror_jax-{mirror.__version__}.dist-info/METADATA").decode()
    roots = {name.split("/")[0] for name in names}
    assert roots == {"mirror", f"mirror_jax-{mirror.__version__}.dist-info"}
    for file in (
        "py.typed",
        "_src/base/other_names.md",
        "_src/devices/gpus.toml",
        "_src/tools/commands.toml",
    ):
        assert f"mirror/{file}" in names
    for path in (fresh.ROOT / "mirror").rglob("*.py"):
        assert path.relative_to(fresh.ROOT).as_posix() in names
    assert "Author: The mirror developers" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    assert "# mirror\n" in metadata


@pytest.mark.dev("build", "setuptools")
@pytest.mark.slow
def test_wheel_runs_the_readme(installed, tmp_path):
    code = "\n".join(block.code for block in blocks(PAGES["README.md"]))
    where = "\nprint(mirror.__file__)\n"
    (tmp_path / "readme.py").write_text(code + where)
    *_, file = output_of(
        [str(installed), "readme.py"], tmp_path, JAX_NUM_CPU_DEVICES="4"
    ).splitlines()
    assert file.startswith(str(installed.parents[1]))


@pytest.mark.dev("build", "setuptools")
@pytest.mark.nightly
def test_wheel_runs_the_demo(installed, tmp_path):
    command = [str(installed), "-m", "mirror", "demo", "--epochs", "1", "--json"]
    printed = output_of(command, tmp_path)
    outcome = json.loads(printed[printed.index("\n{") :])
    assert outcome["replicas_equal"]


@pytest.mark.dev("build", "setuptools")
@pytest.mark.nightly
def test_wheel_runs_a_notebook(installed, tmp_path):
    """The kernel is the environment's Python, in a folder with the notebook alone."""
    shutil.copy(fresh.ROOT / "notebooks" / "01_quickstart.ipynb", tmp_path / "it.ipynb")
    run = (
        "import nbformat, nbclient; n = nbformat.read('it.ipynb', 4)\n"
        "n.cells.append(nbformat.v4.new_code_cell('import mirror; print(mirror.__file__)'))\n"
        "nbclient.NotebookClient(n, timeout=900, kernel_name='wheel').execute()\n"
        "print(n.cells[-1].outputs[0].text)\n"
    )
    kernel = tmp_path / "data" / "kernels" / "wheel"
    kernel.mkdir(parents=True)
    argv = [str(installed), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "wheel", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    folders = {"JUPYTER_DATA_DIR": str(tmp_path / "data"), "IPYTHONDIR": str(tmp_path / "ipython")}
    folders["JUPYTER_RUNTIME_DIR"] = str(tmp_path / "runtime")
    printed = output_of([str(installed), "-c", run], tmp_path, **folders)
    assert printed.strip().splitlines()[-1].startswith(str(installed.parents[1])), printed
