"""Links to other hosts: their form. No test opens a connection."""

import json
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.support import fresh

# Hosts of projects that mirror builds on or is compared with. Add one here if a page needs it.
HOSTS = {
    "arxiv.org",
    "chex.readthedocs.io",
    "dm-haiku.readthedocs.io",
    "docs.github.com",
    "docs.jax.dev",
    "docs.kidger.site",  # Equinox
    "docs.nvidia.com",
    "docs.pytest.org",
    "docs.pytorch.org",
    "docs.python.org",
    "docs.ray.io",
    "enpasos.github.io",  # jax2onnx
    "filesystem-spec.readthedocs.io",  # fsspec
    "flax.readthedocs.io",
    "google-grain.readthedocs.io",
    "huggingface.co",
    "jobset.sigs.k8s.io",
    "keras.io",
    "keepachangelog.com",
    "kubernetes.io",
    "learn.microsoft.com",
    "lightning.ai",
    "onnx.ai",
    "openxla.org",
    "optax.readthedocs.io",
    "orbax.readthedocs.io",
    "slurm.schedmd.com",
    "www.tensorflow.org",
}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)]*://[^)]*)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*://[^`\n]*`", re.DOTALL | re.M)
_VERSION = re.compile(r"/v?\d{1,3}(\.\d+)+(/|$)")  # not the number of an article


def prose() -> dict[str, str]:
    """Returns the text of each page and of the Markdown cells of each notebook, without code."""
    root = fresh.ROOT
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), root / "mirror" / "README.md"]
    texts = {path: path.read_text() for path in [*pages, *(root / "benchmarks").glob("*.md")]}
    for path in (root / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        texts[path] = "\n\n".join(sources)
    return {str(path.relative_to(root)): _CODE.sub("", text) for path, text in texts.items()}


PROSE = prose()


def faults(text: str) -> Iterator[str]:
    """Yields what is wrong with the external links of a text."""
    links = list(_LINK.finditer(text))
    if "://" in _LINK.sub("", text):
        yield "an address outside a link: write [text](https://...)"
    for link in links:
        target = link["target"]
        address = urlsplit(target)
        wrong = {
            "has to be https": address.scheme != "https",
            "contains a space": target != "".join(target.split()),
            "has a query, which may track readers": bool(address.query),
            "names a host that is not in HOSTS": address.netloc not in HOSTS,
            "names a version, which ages": bool(_VERSION.search(address.path)),
            "has a text that does not say where it leads": len(link["text"].strip(" .")) < 3
            or link["text"].lower() in ("here", "link", "this", "this page"),
        }
        yield from (f"{target} {fault}" for fault, is_true in wrong.items() if is_true)


def test_external_links_have_the_right_form(subtests):
    for name, text in PROSE.items():
        with subtests.test(msg=name):
            assert list(faults(text)) == []


FAULTS = {
    "an address outside": "See https://docs.jax.dev/ for more.",
    "has to be https": "[JAX](http://docs.jax.dev/)",
    "contains a space": "[JAX](https://docs.jax.dev/ en)",
    "has a query": "[JAX](https://docs.jax.dev/en/latest/?utm_source=mirror)",
    "not in HOSTS": "[JAX](https://docs.jax.dev.example/)",
    "names a version": "[Flax](https://flax.readthedocs.io/en/v0.11.2/guides/randomness.html)",
    "does not say": "[here](https://docs.jax.dev/)",
}


def test_faults_of_links_are_found(subtests):
    for fault, text in FAULTS.items():
        with subtests.test(msg=fault):
            (found,) = faults(text)
            assert fault in found
    right = "[`nnx.Rngs`](https://flax.readthedocs.io/en/stable/guides/randomness.html)"
    assert list(faults(right)) == []
