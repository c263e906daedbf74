"""The page of all results, as a reader sees it and in a real browser."""

import re

import pytest
from synthetic_results import stored
from test_page_in_chromium import DESKTOP, PHONE, look

from mgk.experiments.artifacts import Artifacts, gather
from mgk.experiments.evidence.claims import CLAIMS
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.reproduce.page import reproduction_page


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Artifacts:
    return gather(stored(tmp_path_factory.mktemp("results")), "laptop")


@pytest.fixture(scope="module")
def page(artifacts) -> str:
    return reproduction_page(artifacts)


def test_claims_come_first_then_tables_then_figures(page):
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[0] == "The paper&#39;s claims"
    kinds = [heading.split()[0] for heading in headings[1:-2]]
    assert kinds == ["Table"] * 4 + ["Ours:"] * 4 + ["Figure"] * 8
    assert headings[-2:] == ["Heads and components", "How this was made"]
    summaries = re.findall(r"<summary>(.*?)</summary>", page)[: len(CLAIMS)]
    assert all(": " in summary for summary in summaries)
    assert "confirmed: mgk and smgk with half the heads are as accurate" in summaries[0]


def test_each_part_has_its_command(page):
    for name in ("table1", "table4", "mixtures", "fig1", "fig3", "fig8"):
        assert f"mgk reproduce {name} --preset laptop" in page
    assert "forward FLOPs = " in page
    assert "36.76" in page
    assert "PeerRead pairs in place of AAN" in page


def test_everything_is_in_the_file(page):
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "http://" not in page
    assert "https://" not in page
    assert all(alt for alt in re.findall(r'<img alt="(.*?)"', page))


def test_a_page_of_nothing_is_still_a_page():
    nothing = Artifacts(PresetResults("laptop"))
    assert "Nothing has been measured yet" in reproduction_page(nothing)


@pytest.mark.parametrize(("width", "dark"), [(PHONE, True), (DESKTOP, False)])
def test_the_page_is_drawn_and_readable(browser, page, tmp_path, width, dark):
    found, errors = look(browser, page, tmp_path, width=width, dark=dark)
    assert (errors, found["requests"]) == ([], [])
    assert found["scrollWidth"] <= width, found["wide"]
    assert found["wide"] == []
    # Maps of figures 2, 5 and 8: 2 + 2 + 1 heads in 2 layers each.
    assert len(found["images"]) == 3 * 2 * (2 + 2 + 1)
    assert all(natural > 0 and alt for natural, _, alt in found["images"])
    assert len(found["charts"]) > 20
    assert all(min(w, h) > 30 and len(label) > 20 for w, h, label, _ in found["charts"])
    assert found["fonts"] >= 14
    paper, ink = (sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("paper", "ink"))
    assert (paper < ink) == dark
