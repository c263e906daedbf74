"""What the page says, and that it needs nothing but itself. In a browser: test_page_in_chromium.py."""

import json
import re
from html.parser import HTMLParser

import pytest
from example_comparison import example

from mgk._util import json_codec
from mgk._util.json_codec import dump, load
from mgk.experiments.compare.page import comparison_page, result_table, summary, verdict
from mgk.experiments.compare.result import Comparison, read_comparison
from mgk.training.errors import RecipeError


class Checker(HTMLParser):
    """Tags that close in order, pictures with texts, addresses that stay inside."""

    VOID = ("meta", "link", "img", "line", "circle", "polyline", "polygon")

    def __init__(self):
        super().__init__()
        self.open, self.pictures = [], 0

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        for name in ("src", "href"):
            assert values.get(name, "data:").startswith("data:"), f"{tag} reaches out to {values[name]}"
        if tag == "img":
            assert values["alt"]
        if tag == "svg":
            assert values.get("aria-label") or values.get("aria-hidden") == "true"
        self.pictures += tag in ("img", "svg")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("seeds", "metric"), [(s, metric) for s in (1, 3) for metric in ("accuracy", "perplexity", "bits_per_byte")]
)
def test_the_page_is_whole_and_self_contained(seeds, metric):
    text = comparison_page(*example(seeds, metric))
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.pictures >= 2 * (2 + 1 + 1) + 3  # maps, curves, differences
    assert not re.findall(r"https?://|@import|<script", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "&lt;angle brackets&gt; &amp; two cores" in text
    assert "mgk compare listops --baseline softmax:2" in text


def test_the_table_has_ratios_to_the_baseline():
    comparison, _ = example()
    _, columns, (first, second, third) = result_table(comparison)
    assert columns[1] == "test accuracy"
    assert first[2] == "80.0k"
    assert second[2] == "71.0k (0.89)"
    assert third[-1] == "not measured"
    assert re.fullmatch(r"\d\d\.\d% \(\d\d\.\d to \d\d\.\d\)", first[1])


def test_sentences_say_what_is_significant():
    comparison, _ = example()
    sentences = summary(comparison)
    assert sentences[0].startswith("softmax with 2 heads: ")
    assert "majority-class baseline has 20.0%" in sentences[0]
    assert "smgk with 1 head has 11% fewer parameters" in sentences[1]
    assert "one seed does not show seed variance" in verdict(comparison, comparison.results[2])
    repeated, _ = example(3)
    assert "significantly better than the baseline" in verdict(repeated, repeated.results[2])
    same, _ = example(names=("mgk:1", "mgk:2"))
    equal = same.results[1].paired
    assert equal.gained > equal.lost == 0
    one, _ = example(1, "perplexity")
    assert "one seed gives no confidence interval" in verdict(one, one.results[1])
    several, _ = example(3, "perplexity")
    assert "lower" in verdict(several, several.results[1])
    assert "significantly better than the baseline" in verdict(several, several.results[1])


def test_bits_per_byte_have_an_interval_over_blocks_of_one_run():
    comparison, _ = example(1, "bits_per_byte")
    sentence = verdict(comparison, comparison.results[1])
    assert re.match(r"its bits per byte is \d\.\d{3} lower \(95% CI over blocks of the text -1\.0", sentence)
    assert "(95% CI over seeds and blocks of the text" in verdict(
        *_first_candidate(example(3, "bits_per_byte")[0])
    )


def _first_candidate(comparison):
    return comparison, comparison.results[1]


@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "bits_per_byte"])
def test_json_round_trip(metric):
    comparison, _ = example(3, metric)
    assert load(Comparison, json.loads(json.dumps(dump(comparison)))) == comparison
    with pytest.raises(ValueError, match="format: input should be 1"):
        load(Comparison, {**dump(comparison), "format": 2})


def test_a_changed_comparison_is_refused(tmp_path):
    comparison, _ = example()
    path = tmp_path / "comparison.json"
    json_codec.write(path, comparison)
    assert read_comparison(path) == comparison
    text = path.read_text()
    for changed in (text.replace('"estimate": 0.', '"estimate": 0.1', 1), text.replace('"sha256"', '"sha255"')):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(RecipeError, match=r"this is not a comparison \(it.*\); run it again"):
            read_comparison(path)
