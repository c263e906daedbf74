"""The page in a real browser: no error, every picture drawn, readable on a phone, dark where the reader wants it."""

import re

import pytest
from example_comparison import example

from mgk.experiments.compare.page import comparison_page

PHONE, DESKTOP = 390, 1200

PROBE = """(() => ({
  width: innerWidth,
  scrollWidth: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll("body *")]
    .filter(e => !e.closest(".scroll, pre") && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + "." + e.className),
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
}))()"""


@pytest.fixture(scope="module")
def page():
    return comparison_page(*example(3))


def look(browser, page, tmp_path, *, width, dark=False):
    """What the probe finds, and the errors of the page."""
    (tmp_path / "page.html").write_text(page)
    browser.errors.clear()
    browser.look(width=width, dark=dark, touch=width == PHONE)
    browser.open(tmp_path / "page.html")
    return browser.value(PROBE), browser.errors


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (PHONE, True), (DESKTOP, False)])
def test_the_page_is_drawn_and_readable(browser, page, tmp_path, width, dark):
    found, errors = look(browser, page, tmp_path, width=width, dark=dark)
    assert (errors, found["requests"]) == ([], [])
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


def test_a_faulty_page_is_noticed(browser, page, tmp_path):
    broken = page.replace(
        "</main>", '<img alt="" src="data:image/png;base64,AAAA"><div style="width:900px">x</div></main>'
    )
    broken = broken.replace("</body>", "<script>console.error('a fault'); nothing.at.all</script></body>")
    found, errors = look(browser, broken, tmp_path, width=PHONE)
    assert any("a fault" in error for error in errors), errors
    assert any("ReferenceError" in error for error in errors)
    assert found["scrollWidth"] > PHONE
    assert any(natural == 0 for natural, _, _ in found["images"])
