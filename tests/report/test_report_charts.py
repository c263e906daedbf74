import re

import pytest
from markupsafe import Markup

from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.render.charts import Series, interval_chart, line_chart, series_over_seeds
from mgk.experiments.render.html import code_block, figure, page, paragraph, table
from mgk.experiments.render.numbers import bytes_text, interval_text, percent, points, seconds_text, short


def numbers(text, attribute):
    return [float(value) for value in re.findall(rf' {attribute}="(-?[\d.]+)"', text)]


@pytest.mark.parametrize(
    "points",
    [
        [(0, 1.0), (10, 2.0)],
        [(5, 3.0)],
        [(0, 7.0), (1, 7.0)],
        [(0, -1e-7), (1e6, 3e8)],
        [(0, -5.0), (3, -4.0)],
    ],
)
def test_curves_stay_inside_their_box(points):
    chart = line_chart([Series("one", points)], x_label="x", y_label="y", alt="a curve")
    drawn = re.search(r'<polyline[^>]* points="([^"]*)"', chart)[1].split()
    for pair in drawn:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 400
        assert 0 <= y <= 260


def test_charts_are_named_and_their_curves_told_apart_without_colour():
    series = [
        Series("one", [(0, 1.0), (1, 2.0)], [(0, 0.5, 1.5), (1, 1.5, 2.5)]),
        Series("two", [(0, 1.0), (1, 0.5)]),
    ]
    chart = line_chart(series, x_label="steps", y_label="loss", alt='falls "a lot" & more')
    assert 'aria-label="falls &#34;a lot&#34; &amp; more"' in chart
    assert chart.count("<polygon") == 1
    assert "stroke-dasharray" in chart
    assert all(name in chart for name in (">steps<", ">loss<", "one</li>", "two</li>"))


def test_an_unbounded_interval_reaches_the_edges():
    chart = interval_chart(
        [("a", Interval(-2.0, float("-inf"), float("inf")))], x_label="difference", alt="wide"
    )
    assert "inf" not in chart
    assert max(numbers(chart, "x2")) <= 400


def test_a_chart_of_nothing_raises():
    with pytest.raises(ValueError, match="at least one point"):
        line_chart([], x_label="x", y_label="y", alt="nothing")


def test_smoothing_keeps_the_mean_and_short_curves():
    curve = [(float(x), float(x % 2)) for x in range(20)]
    assert [y for _, y in series_over_seeds("", [curve], 4).points] == [0.5] * 5
    assert series_over_seeds("", [curve[:5]], 4).points == curve[:5]


def test_texts_are_escaped_and_markup_is_not():
    text = page(
        "<title>",
        [paragraph("a < b", Markup("<b>c</b>")), code_block("x && y"), figure(Markup("<i></i>"), "&")],
    )
    assert "<h1>&lt;title&gt;</h1>" in text
    assert "a &lt; b <b>c</b>" in text
    assert "x &amp;&amp; y" in text
    assert "<td>&lt;1</td>" in table("caption", ["a", "b"], [["x", "<1"]])


def test_numbers_for_people():
    assert [short(x) for x in (0, 7, 999, 999.7, 41544, 1.25e6, 9.996e8, 3e15)] == [
        *("0", "7.00", "999", "1.00k", "41.5k", "1.25M", "1.00G", "3.00P"),
    ]
    assert (percent(0.1234), points(-0.0123)) == ("12.3%", "−1.2")
    assert interval_text(Interval(0.5, 0.4, 0.6), percent) == "50.0% (40.0 to 60.0)"
    assert (seconds_text(0.0123), seconds_text(2.5)) == ("12.3 ms", "2.50 s")
    assert (bytes_text(5e6), bytes_text(2.5e9), bytes_text(900)) == ("5.00 MB", "2.50 GB", "1 kB")
