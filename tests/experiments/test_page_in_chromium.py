"""The page in a real browser: no error, every picture drawn, readable on a phone, dark where the reader wants it."""

import json
import re
import shutil
import subprocess
from urllib.parse import unquote

import pytest
from example_comparison import example

from mgk.experiments.compare.page import comparison_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH")

PHONE, DESKTOP = 390, 1200

# Runs in the page when all is loaded, and tells the page around it, where --dump-dom shows it.
PROBE = """
<script>
window.errors = [];
addEventListener("error", event => errors.push(String(event.message || event.target.src)), true);
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")]
    .filter(e => !e.closest(".scroll, pre") && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + "." + e.className);
  const found = {
    errors,
    width: innerWidth,
    scrollWidth: document.documentElement.scrollWidth,
    wide,
    images: [...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width, i.alt]),
    charts: [...document.querySelectorAll("svg[role=img]")].map(s => {
      const box = s.getBBox();
      return [box.width, box.height, s.getAttribute("aria-label"), s.getBoundingClientRect().width];
    }),
    fonts: Math.min(...[...document.querySelectorAll("p, td, th, figcaption, dd, li")]
      .map(e => parseFloat(getComputedStyle(e).fontSize))),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    requests: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
  };
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""


# The page in a frame: a window has no width below 500.
FRAME = """<!doctype html>
<meta name="color-scheme" content="light dark">
<script>addEventListener("message", event => {{
  const place = document.createElement("textarea");
  place.id = "found";
  place.textContent = encodeURIComponent(event.data);
  document.body.append(place);
}});</script>
<body style="margin: 0"><iframe src="probed.html" style="width: {width}px; height: 900px; border: 0"></iframe></body>
"""


def look(page, tmp_path, *, width, dark=False):
    """What the probe finds, and what the console says."""
    (tmp_path / "probed.html").write_text(page.replace("<head>", "<head>" + PROBE, 1))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width))
    result = browse(frame, tmp_path, "--dump-dom", dark=dark)
    found = re.search(r'id="found">(.*?)</textarea>', result.stdout)
    assert found, result.stdout[-2000:]
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(unquote(found[1])), console


def browse(file, tmp_path, *options, dark=False):
    return subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={DESKTOP},1000",
            "--virtual-time-budget=5000",
            *options,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.fixture(scope="module")
def page():
    return comparison_page(*example(3))


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (PHONE, True), (DESKTOP, False)])
def test_the_page_is_drawn_and_readable(page, tmp_path, width, dark):
    found, console = look(page, tmp_path, width=width, dark=dark)
    assert (found["errors"], console, found["requests"]) == ([], [], [])
    assert found["width"] == width
    assert found["scrollWidth"] <= width, found["wide"]
    assert found["wide"] == []
    assert len(found["images"]) == 2 * (2 + 1 + 1)
    assert all(natural > 0 and shown >= 90 and alt for natural, shown, alt in found["images"])
    assert len(found["charts"]) == 3
    for inner_width, inner_height, label, shown in found["charts"]:
        assert min(inner_width, inner_height) > 50
        assert len(label) > 50
        assert 300 <= shown <= width
    assert found["fonts"] >= 14
    paper, ink = (sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("paper", "ink"))
    assert (paper < ink) == dark


def test_a_faulty_page_is_noticed(page, tmp_path):
    broken = page.replace(
        "</main>", '<img alt="" src="data:image/png;base64,AAAA"><div style="width:900px">x</div></main>'
    )
    broken = broken.replace("</body>", "<script>console.error('a fault'); nothing.at.all</script></body>")
    found, console = look(broken, tmp_path, width=PHONE)
    assert len(found["errors"]) == 2
    assert any("a fault" in line for line in console)
    assert found["scrollWidth"] > PHONE
    assert any(natural == 0 for natural, _, _ in found["images"])
