"""What the pages hold besides what is written in them.

KaTeX is served with them; notebooks become pages, and so do the committed tables of
benchmarks/results.
"""

from __future__ import annotations

import base64
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = runpy.run_path(str(Path(__file__).with_name("address.py")))
TABLES = runpy.run_path(str(Path(__file__).with_name("tables.py")))
KATEX = ROOT / "docs" / "katex" / "node_modules" / "katex" / "dist"
BENCHMARKS = ROOT / "benchmarks" / "results"
REPORTS = 0.1  # what a word in a report counts, beside one in a page
# words that people look for and a page does not have, or not at its beginning
TAGS = {
    "#on-a-gpu": "gpu cuda",
    "operators/": "differentiable",
    "operators/#how-to-choose-tau": "temperature sharp",
    "api/estimators/#khot.estimators.gumbel": "gumbel",
    "sampling/": "exactly",
    "numerics/": "half mixed autocast",
    "performance/": "slow",
    "packed/": "offsets",
    "pruning/#n-of-every-m": "2:4",
}
# In the theme's search: what makes a word also find what it is the beginning of, and the same but for short
# words. The p of top-p would find all that begins with p.
BEGINNINGS = ("?r:`${r}*`)", r"||/(^|-)\w{1,3}$/.test(r)?r:`${r}*`)")


def on_config(config: Any) -> Any:
    """The addresses, if there are any. `repo_url` is not set, or the theme would ask GitHub for stars."""
    config.site_url = ADDRESS["site"]() or config.site_url
    if repository := ADDRESS["repository"]():
        config.extra["social"] = [
            {"icon": "fontawesome/brands/git-alt", "link": repository, "name": "Source"}
        ]
    return config


def on_files(files: Any, config: Any) -> Any:
    if not KATEX.is_dir():
        raise PluginError("docs/katex/node_modules is missing; `make docs` installs it")
    for path in (KATEX / "katex.min.css", KATEX / "katex.min.js", *(KATEX / "fonts").glob("*.woff2")):
        name = f"assets/katex/{path.relative_to(KATEX)}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(BENCHMARKS.rglob("*.png")):
        name = f"benchmarks/{path.relative_to(BENCHMARKS)}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(BENCHMARKS.rglob("*.md")):
        name = f"benchmarks/{path.relative_to(BENCHMARKS)}"
        files.append(File.generated(config, name, content=report(path)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for name, content in notebook(path).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("benchmarks/"):
        page.meta.setdefault("search", {"exclude": True})
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"boost": REPORTS})
    if page.file.src_uri.startswith("api/"):
        return str(TABLES["entries"](markdown))
    markdown = re.sub(r"\(([\w/]+)\.ipynb\)", r"(\1.md)", markdown)
    return markdown.replace("](../benchmarks/results/", "](benchmarks/")


def on_post_build(config: Any, **_: Any) -> None:
    """Weighs names and words in the index of the search.

    A name should find its entry in the reference first. The search weighs a word by how rare it is, and a
    word also finds what it is the beginning of. So the entry of `soft_topk`, which many pages mention, would
    come after that of `soft_topk_sum`. The weight of an entry makes up for the first, and is larger for
    shorter names because of the second.
    """
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    parts = re.compile(index["config"]["separator"])
    texts = [f"{entry['title']} {re.sub('<[^>]+>', ' ', entry['text'])}" for entry in index["docs"]]
    words = [set(parts.split(text.lower())) for text in texts]
    pages = [path.read_text(encoding="utf-8") for path in TABLES["PAGES"].glob("*.md")]
    names = {name for page in pages for name in TABLES["names"](page)}
    for entry in index["docs"]:
        _, _, name = entry["location"].partition("#")
        last = name.rpartition(".")[2]
        # names that begin with it are found by "khot" alone, which is in all of them
        if name in names and not last.startswith("KHot"):
            count = sum(last.lower() in some for some in words)
            rarity = math.log1p((len(words) - count + 0.5) / (count + 0.5))  # as lunr computes it
            entry["boost"] = 33 / (rarity * len(last))
    places = {entry["location"]: entry for entry in index["docs"]}
    for place, tag in TAGS.items():
        places[place]["tags"] = [tag]
    path.write_text(json.dumps(index), encoding="utf-8")
    (worker,) = Path(config.site_dir).glob("assets/javascripts/workers/search.*.js")
    text = worker.read_text(encoding="utf-8")
    if text.count(BEGINNINGS[0]) != 1:
        raise PluginError("this version of the theme searches in another way: adapt BEGINNINGS")
    worker.write_text(text.replace(*BEGINNINGS), encoding="utf-8")


def report(path: Path) -> str:
    """A committed table as a page, with its pictures."""
    text = path.read_text(encoding="utf-8")
    title, command = TABLES["benchmark"](path.stem)
    if not text.startswith("# "):
        text = f"# {title}\n\n`python {command}`\n\n{text}"
    plots = [plot.name for plot in sorted(path.parent.glob(f"{path.stem}*.png")) if plot.name not in text]
    return "\n\n".join([text, *(f"![{title}]({name})" for name in plots)])


def notebook(path: Path) -> dict[str, Any]:
    """The page that a notebook makes, with the outputs that it stores, and its pictures."""
    book = nbformat.read(path, as_version=4)
    text: list[str] = []
    files: dict[str, bytes] = {}
    for cell in book.cells:
        if cell.cell_type == "markdown":
            text.append(cell.source)
            continue
        text.append(f"```python\n{cell.source}\n```")
        data = [output.get("data", {"text/plain": output.get("text")}) for output in cell.outputs]
        if printed := "".join(d["text/plain"] for d in data if "image/png" not in d):
            text.append(f"```{{.text .no-copy}}\n{printed.rstrip()}\n```")
        for picture in (d["image/png"] for d in data if "image/png" in d):
            name = f"{path.stem}-{len(files)}.png"
            files[name] = base64.b64decode(picture)
            text.append(f"![what the cell above draws]({name})")
    note = f"*This page is the notebook `docs/notebooks/{path.name}`.*"
    text.insert(1, note)
    return {f"{path.stem}.md": "\n\n".join(text), **files}
