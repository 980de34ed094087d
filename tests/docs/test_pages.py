"""The built site (`make docs`) in a real browser, with the widths of a desktop and of a phone.

The tests are skipped if the site or the browser is missing, unless KHOT_REQUIRE_CHROMIUM=1 makes that a
failure. Screenshots go to the folder KHOT_SCREENSHOTS, if it is set.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

import khot
import pages

DOCS = Path(__file__).resolve().parents[2] / "docs"
SITE = DOCS.parent / "site"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
# of the committed tables, which are alike, the longest and the widest
LOOKED_AT = [page for page in PAGES if not re.match(r"benchmarks/(?!(cpu|device)/)", page)]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (1280, 390)
SLOW = 120_000  # milliseconds; the machine may be busy

# The elements that stick out to the right, except those in a box that scrolls or hides them.
STICKS_OUT = """() => {
    const scrolls = e => e && e !== document.body && e !== document.documentElement
        && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
    return [...document.querySelectorAll(".md-content *, .md-header *, .md-footer *")]
        .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)
        .filter(e => e.checkVisibility() && !scrolls(e))
        .map(e => `${e.tagName} ${e.className}: ${e.textContent.slice(0, 60)}`);
}"""
BROKEN = "() => [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
# What is documented on the page and has a formula that is typeset.
HAVING_FORMULAS = """() =>
    [...document.querySelectorAll(".doc-object:has(> .doc-contents > .arithmatex .katex) > .doc-heading")]
    .map(heading => heading.id)"""
RAW_FORMULAS = """() => [...document.querySelectorAll(".arithmatex")]
    .filter(e => !e.querySelector(".katex") || e.querySelector(".katex-error")).map(e => e.textContent)"""


# What is in the clipboard after a click on the button of each block of Python, and the entry that has it.
COPIED = """async () => {
    const found = [];
    for (const block of document.querySelectorAll("div.language-python:not(.doc-signature)")) {
        await navigator.clipboard.writeText("");
        block.querySelector("button[data-md-type=copy]").click();
        const entry = block.closest(".doc-object");
        found.push([entry?.querySelector(".doc-heading").id ?? "", await navigator.clipboard.readText()]);
    }
    return found;
}"""

ALL_HAVE_BUTTONS = """() => [...document.querySelectorAll("div.language-python")]
    .every(block => block.querySelector("button[data-md-type=copy]"))"""

# The texts whose colour differs from what is behind them by less than the ratio that WCAG asks for.
FAINT = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = color => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const up = e => e ? [e, ...up(e.parentElement)] : [];
    const over = (below, [r, g, b, a]) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
    const behind = e => up(e).reverse().map(n => rgba(getComputedStyle(n).backgroundColor))
        .reduce(over, [255, 255, 255]);
    const linear = value => value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.05 + 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const ratio = e => {
        const style = getComputedStyle(e), below = behind(e);
        const [r, g, b, a] = rgba(e instanceof SVGElement ? style.fill : style.color);
        const opacity = up(e).reduce((product, n) => product * getComputedStyle(n).opacity, a);
        const [low, high] = [light(below), light(over(below, [r, g, b, opacity]))].sort((x, y) => x - y);
        return high / low;
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (texts.nextNode()) {
        const e = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
        const shown = e.checkVisibility({ opacityProperty: true, visibilityProperty: true });
        if (text && shown && e.getClientRects().length && ratio(e) < 4.5) found.push(`${ratio(e)}: ${text}`);
    }
    return found;
}"""


def absent(what: str) -> None:
    if os.environ.get("KHOT_REQUIRE_CHROMIUM") == "1":
        pytest.fail(f"KHOT_REQUIRE_CHROMIUM=1, but {what}")
    pytest.skip(what)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not PAGES:
        absent("there is no site: make docs")
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        absent("there is no Chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("there is no playwright")
    with sync_playwright() as playwright:
        # a container may have neither user namespaces nor a large /dev/shm
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        # no request leaves the machine; catching each of them instead would turn off the browser's cache
        arguments.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    """One for all pages, so that what they share is loaded once."""
    context = browser.new_context(
        viewport={"width": WIDTHS[0], "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    yield context
    context.close()


def wrong_copies(page: str, copies: list[tuple[str, str]]) -> list[str]:
    """What was copied from a page and is not what the tests run, or from the reference and does not run."""
    source = DOCS / f"{page.removesuffix('index.html').rstrip('/') or 'index'}.md"
    if page.startswith("api/"):
        names: dict[str, dict[str, Any]] = {}  # of each entry
        for entry, code in copies:
            torch.manual_seed(0)
            try:
                exec(compile(code, entry, "exec"), names.setdefault(entry, {"__name__": "copied"}))
            except Exception as error:
                return [f"{entry}: {error!r}"]
        return []
    if source.exists():
        blocks = pages.blocks(source.read_text(encoding="utf-8"))
    elif (notebook := source.with_suffix(".ipynb")).exists():
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        blocks = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    else:  # a committed table, or a page that is not ours
        blocks = []
    same = [block.strip() for block in blocks] == [code.strip() for _, code in copies]
    return [] if same else ["what is copied is not what is tested"]


@pytest.mark.parametrize("page", LOOKED_AT or [""])
def test_page(page: str, address: str, context: Any) -> None:
    complaints: list[str] = []

    def asked(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            complaints.append(f"a request leaves the machine: {request.url}")

    tab = context.new_page()
    tab.set_default_timeout(SLOW)
    tab.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    tab.on("request", asked)
    tab.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    tab.on("response", lambda r: complaints.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    tab.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    tab.goto(address + page, wait_until="load")
    tab.evaluate("document.fonts.ready.then(() => null)")
    complaints += [f"broken picture: {src}" for src in tab.evaluate(BROKEN)]
    complaints += [f"formula: {text}" for text in tab.evaluate(RAW_FORMULAS)]
    wanted = {name for name in FORMULAS.split() if f'id="{name}"' in (SITE / page).read_text("utf-8")}
    missing = wanted.difference(tab.evaluate(HAVING_FORMULAS))
    complaints += [f"no formula: {name}" for name in sorted(missing)]
    tab.wait_for_function(ALL_HAVE_BUTTONS)
    complaints += wrong_copies(page, tab.evaluate(COPIED))
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        sticking_out = tab.evaluate(STICKS_OUT)
        complaints += [f"too wide at {width}: {what}" for what in sticking_out[:3]]
        if tab.evaluate("document.documentElement.scrollWidth") > width:
            complaints.append(f"the page scrolls sideways at {width}")
        if folder := os.environ.get("KHOT_SCREENSHOTS"):
            name = page.removesuffix("/index.html").removesuffix(".html").replace("/", "-")
            tab.screenshot(path=f"{folder}/{name}-{width}.png", full_page=True)
    found = list(complaints)
    tab.close()  # and cancels what the page still asks for
    assert found == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["index", "operators/index", "performance/index", "api/topk/index"])
def test_texts_can_be_read(page: str, scheme: str, address: str, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": WIDTHS[0], "height": 900}, color_scheme=scheme)
    tab.goto(f"{address}{page}.html")
    found = tab.evaluate(FAINT)
    tab.close()
    assert found == []


def test_code_is_above_the_fold(address: str, browser: Any) -> None:
    for width, height in zip(WIDTHS, (900, 844), strict=True):
        tab = browser.new_page(viewport={"width": width, "height": height})
        tab.goto(f"{address}index.html")
        box = tab.locator("div.language-python").first.bounding_box()
        tab.close()
        assert box["y"] + box["height"] < height


def test_links_to_places_arrive(address: str) -> None:
    texts = {page: (SITE / page).read_text("utf-8") for page in PAGES}
    places = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    lost = []
    for page, text in texts.items():
        for path, name in re.findall(r'\bhref="([^":#?]*)#([^"]+)"', text):
            target = os.path.normpath((SITE / page).parent / path) if path else SITE / page
            file = Path(target) / "index.html" if Path(target).is_dir() else Path(target)
            if unquote(html.unescape(name)) not in places[str(file.relative_to(SITE))] | {"__"}:
                lost.append(f"{page}: {path}#{name}")
    assert lost == []


# what people look for, and the page that answers first
QUERIES = {
    "spearman": "api/losses/",
    "choose tau": "operators/",
    "onnx": "export/",
    "DTensor": "distributed/",
    "mixture of experts": "api/experts/",
    "gumbel_softmax": "migration/",
    "nucleus": "budgets/",
    "conformal": "operators/",
    "top-p": "budgets/",
    "top-k": "api/topk/",
    "soft top-k": "api/topk/",
    "gumbel top-k": "api/estimators/",
    "straight-through": "gradients/",
    "differentiable": "operators/",
    "temperature": "operators/",
    "torch.compile": "export/",
    "learned k": "operators/",
    "exactly k": "sampling/",
    "knapsack": "budgets/",
    "ragged": "packed/",
    "variable length": "packed/",
    "half precision": "numerics/",
    "pruning": "pruning/",
    "2:4": "pruning/",
    "sparse autoencoder": "sparse-autoencoders/",
    "feature selection": "selectors/",
    "load balancing": "balancing/",
    "ranking loss": "ranking/",
    "install": "",
    "how to prune a network": "api/pruning/",
    "learning to rank": "ranking/",
    "recall at k": "api/losses/",
    "mixed precision": "numerics/",
    "jax": "jax/",
    "gpu": "",
    "cuda": "",
    "offsets": "packed/",
    "lora": "pruning/",
    "transcoder": "sparse-autoencoders/",
    "pad_sequence": "ranking/",
    "lightning": "recipes/",
}
# names that have an entry in the reference, which comes before all that mentions them
NAMES = """
soft_topk topk topk_mask sparse_topk laplace_topk linear_topk soft_topk_magnitude soft_topk_sum
k_support_norm soft_count quantile kth_value soft_median soft_rank soft_sort soft_permutation soft_budget
soft_assign sample_khot Laplace Power simple gumbel ConditionalPoisson RelaxedKHot FenchelYoungTopKLoss
ndcg_loss size_penalty SoftTopK Anneal TopKAttention TopKRouter MixtureOfExperts QuantileBalancer SoftKNN
KHotGate prune_n_m TopKSAE KHotSelector khot.soft_topk khot.nn.prune_global khot.losses.log_rank_loss
"""


def test_search_finds_the_right_page_first(address: str, browser: Any) -> None:
    assert len(NAMES.split()) >= 30
    tab = browser.new_page(viewport={"width": WIDTHS[0], "height": 900})
    tab.set_default_timeout(SLOW)
    first: dict[str, list[str]] = {}
    tab.goto(f"{address}index.html?q=khot")  # loads the index and opens the search, once for all queries
    box = tab.locator(".md-search__input")
    for query in [*QUERIES, *NAMES.split()]:
        tab.wait_for_selector("a.md-search-result__link", state="attached")
        tab.evaluate("document.querySelector('.md-search-result__list').replaceChildren()")
        box.fill(query)
        box.press("End")
        tab.wait_for_selector("a.md-search-result__link", state="attached")
        # the page, and the section of it that fits best
        first[query] = tab.eval_on_selector_all(
            ".md-search-result__list > li:first-child a.md-search-result__link",
            "links => links.map(a => new URL(a.href)).map(url => url.pathname.slice(1) + url.hash)",
        )
    tab.close()
    assert {query: first[query][0].partition("#")[0] for query in QUERIES} == QUERIES
    found = {name: first[name][1] for name in NAMES.split()}
    wrong = {
        n: at for n, at in found.items() if not re.fullmatch(rf"api/\w+/(index.html)?#([\w.]+\.)?{n}", at)
    }
    assert wrong == {}


def figure_agrees(tab: Any) -> list[float]:
    """The weights that the figure of the home page shows, which are those of khot."""
    shown = tab.evaluate("() => ({...document.querySelector('#khot-figure').dataset})")
    scores, weights = (torch.tensor(json.loads(shown[name])).double() for name in ("scores", "weights"))
    wanted = khot.sigmoid_topk(scores, float(shown["k"]), tau=float(shown["tau"]))
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)
    return weights.tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_figure_of_the_home_page(width: int, address: str, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.set_default_timeout(SLOW)
    tab.goto(address + "index.html")
    before = figure_agrees(tab)
    k, tau = tab.locator("#khot-figure input").all()
    for slider in (k, tau):
        slider.focus()
        for key in ("ArrowRight", "End", "Home"):  # Home: k = 0, and the smallest tau
            tab.keyboard.press(key)
            figure_agrees(tab)
    k.focus()
    for _ in range(9):
        tab.keyboard.press("ArrowRight")
    assert sum(figure_agrees(tab)) == pytest.approx(9 / 4)
    handles = tab.locator("#khot-figure [role=slider]").all()
    assert len(handles) == len(before)
    handles[0].focus()
    value = float(handles[0].get_attribute("aria-valuenow"))
    tab.keyboard.press("ArrowUp")
    assert float(handles[0].get_attribute("aria-valuenow")) == pytest.approx(value + 0.1)
    figure_agrees(tab)
    handles[1].evaluate("handle => handle.scrollIntoView({ block: 'center' })")
    box, value = handles[1].bounding_box(), float(handles[1].get_attribute("aria-valuenow"))
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x, y + 40)
    tab.mouse.up()
    assert float(handles[1].get_attribute("aria-valuenow")) < value
    figure_agrees(tab)
    if folder := os.environ.get("KHOT_SCREENSHOTS"):
        tab.locator("#khot-figure").screenshot(path=f"{folder}/figure-{width}.png")
    tab.close()


def test_notes_are_no_pages_and_reports_are_in_the_navigation(address: str, browser: Any) -> None:
    assert not [page for page in PAGES if "notes" in page]
    tab = browser.new_page(viewport={"width": WIDTHS[0], "height": 900})
    tab.goto(address + "results/index.html")
    links = tab.eval_on_selector_all(".md-nav__link", "links => links.map(a => a.href || '')")
    for report in (page for page in PAGES if page.startswith("results/") and "report" in page):
        assert any(report.removesuffix("index.html") in link for link in links), report
    tab.close()


# of each kind some: they say what they compute by a formula
FORMULAS = """
khot.soft_topk khot.log_soft_topk khot.sigmoid_topk khot.laplace_topk khot.ot_topk khot.sparse_topk
khot.soft_count khot.soft_rank khot.soft_sort khot.soft_permutation khot.soft_budget khot.soft_assign
khot.soft_topk_magnitude khot.soft_topk_signed khot.k_support_norm khot.cdfs.Logistic khot.cdfs.Laplace
khot.cdfs.Normal khot.cdfs.Uniform khot.cdfs.Power khot.estimators.straight_through
khot.estimators.second_order khot.estimators.gumbel khot.sampling.conditional_poisson.log_normalizer
khot.distributions.ConditionalPoisson khot.losses.FenchelYoungTopKLoss khot.losses.ndcg_loss
khot.losses.log_rank_loss khot.losses.size_penalty khot.nn.topk_attention khot.nn.TokenChoiceRouter
khot.nn.MixtureOfExperts khot.nn.SoftKNN khot.nn.TopKSAE
"""


def test_formulas_are_typeset(address: str, browser: Any) -> None:
    tab = browser.new_page()
    tab.goto(address + "soft-count/index.html")
    assert tab.locator(".katex").count() >= 10
    assert tab.evaluate("document.fonts.check('1em KaTeX_Main')")
    tab.close()
    # test_page looks at the formulas of those that are there
    pages = "".join((SITE / page).read_text("utf-8") for page in PAGES if page.startswith("api/"))
    assert [name for name in FORMULAS.split() if f'id="{name}"' not in pages] == []
