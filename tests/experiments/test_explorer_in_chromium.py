"""The explorer in a real browser: clicks, keys, touches, both widths, light and dark."""

import re

import pytest
from explorer_example import exploration, image

from mgk.experiments.render.explorer_page import explorer_page

PHONE, DESKTOP = 390, 1200
READY = "document.querySelector('#explorer')?.dataset.ready === 'true'"
FOUND = exploration(layers=3, heads=2)
OTHER = exploration("softmax", heads=4, components=1, seed=1)
CODE = "def f(x):\n    return x\n" + 4 * "\n    # and so on, line by line"
LETTERS = exploration(tokens=[*CODE, "\\xc3", "\\xa9"])


@pytest.fixture
def page(browser):
    browser.errors.clear()
    yield browser
    assert browser.errors == []


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "one": [FOUND],
        "two": [FOUND, OTHER],
        "image": [image()],
        "cls": [image(first=["[cls]"])],
        "letters": [LETTERS],
    }
    for name, models in pages.items():
        (folder / f"{name}.html").write_text(explorer_page(models))
    return folder


def show(page, file, *, width=DESKTOP, fragment="", **options):
    page.look(width=width, **options)
    page.open(file, ready=READY, fragment=fragment)


def heading(page, panel=1):
    return page.value(f"document.querySelector('#model-{panel} .details h3').textContent")


def keys(page, panel=1):
    """Token number and weight in per cent, of the table of keys."""
    rows = page.value(
        f"[...document.querySelectorAll('#model-{panel} .keys tbody tr')]"
        ".map(row => [Number(row.dataset.key), row.querySelector('td').textContent])"
    )
    return [(number, float(text.strip("<%"))) for number, text in rows]


def expected_keys(found, layer, head, query, *, incoming=False):
    weights = found.layers[layer].weights[head]
    row = weights[:, query] if incoming else weights[query]
    order = (-row).argsort(kind="stable")[:8]
    return [(int(j), 100 * float(row[j])) for j in order if row[j] > 0]


def is_same(shown, expected):
    """To the last digit that is shown; the order of weights below 2% is lost when they are stored."""
    known = dict(expected)
    leaders = [number for number, weight in expected if weight > 2]
    is_close = all(abs(weight - known.get(number, 0.5)) < 0.6 for number, weight in shown)
    return is_close and [number for number, _ in shown][: len(leaders)] == leaders


def pixel(page, x, y, panel=1):
    """The colour at a place of the map, from 0 to 1 along its width and height, labels left out."""
    script = f"""(() => {{
      const panel = panels[{panel - 1}], scale = devicePixelRatio, {{ margin, size }} = panel.map.size;
      const place = part => Math.round((margin + part * size) * scale);
      return [...panel.map.canvas.getContext("2d").getImageData(place({x}), place({y}), 1, 1).data.slice(0, 3)];
    }})()"""
    return page.value(script)


def test_a_click_chooses_a_token_and_hovering_shows_another(page, files):
    show(page, files / "one.html")
    last = len(FOUND.example.tokens) - 1
    assert heading(page) == f"“.”, token {last + 1} of {last + 1}, attends to"
    page.click("#model-1 [data-token='6']")
    assert heading(page).startswith("“the”, token 7 of")
    assert is_same(keys(page), expected_keys(FOUND, 2, 0, 6))
    page.hover("#model-1 [data-token='4']")
    assert heading(page).startswith("“river”, token 5 of")
    page.hover("h1")
    assert heading(page).startswith("“the”, token 7 of")
    assert page.value("location.hash") == "#3.1.7"


def test_layer_and_head_are_chosen_by_menu_and_by_small_map(page, files):
    show(page, files / "one.html", fragment="#1.1.9")
    page.click("#model-1 .heads [data-layer='1'][data-head='1']")
    assert is_same(keys(page), expected_keys(FOUND, 1, 1, 8))
    assert page.value("[...document.querySelectorAll('#model-1 select')].map(s => s.value)") == [
        "2 of 3",
        "2 of 2",
    ]
    page.value(
        "(() => { const s = document.querySelector('#model-1 select'); s.selectedIndex = 2;"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert is_same(keys(page), expected_keys(FOUND, 2, 1, 8))
    pressed = "[...document.querySelectorAll('.heads [aria-pressed=true]')].map(b => b.ariaLabel)"
    assert page.value(pressed) == ["Layer 3, head 2"]


def test_the_keyboard_does_all_of_it(page, files):
    show(page, files / "one.html", fragment="#1.1.5")
    page.value("document.querySelector('#model-1 .tokens').focus()")
    page.press("ArrowRight", times=2)
    assert heading(page).startswith("“the”, token 7")
    page.press("Home")
    assert heading(page).startswith("“The”, token 1 ")
    page.value("document.activeElement.blur()")
    page.press("l")
    page.press("h")
    page.press("ArrowRight")
    assert page.value("location.hash") == "#2.2.2"
    page.value("document.querySelector('.heads [aria-pressed=true]').focus()")
    page.press("ArrowDown")
    assert page.value("document.activeElement.ariaLabel") == "Layer 3, head 2"
    page.value("document.querySelector('#model-1 .map').focus()")
    for key in ("ArrowUp", "+", "+", "Enter"):
        page.press(key)
    assert heading(page).startswith("“The”, token 1 ")
    assert page.value("panels[0].map.view.span") < len(FOUND.example.tokens)
    page.press("0")
    assert page.value("panels[0].map.view.span") == len(FOUND.example.tokens)


def test_components_have_colours_priors_and_responsibilities(page, files):
    show(page, files / "one.html", fragment="#2.1.8")
    rows = page.value(
        "[...document.querySelectorAll('.components tbody tr')].map(r => [...r.cells].map(c => c.textContent.trim()))"
    )
    layer = FOUND.layers[1]
    shares = (layer.weights[0, 7] * layer.responsibilities[0, :, 7]).sum(-1)
    assert [row[0] for row in rows] == ["1", "2"]
    assert [float(row[1]) for row in rows] == pytest.approx(layer.prior[0].tolist(), abs=6e-4)
    assert [float(row[2].rstrip("%")) for row in rows] == pytest.approx((100 * shares).tolist(), abs=2)
    j, _ = keys(page)[0]
    shown = page.value("document.querySelector('.keys tbody td:last-child').textContent")
    assert [float(part) for part in shown.split(" · ")] == pytest.approx(
        layer.responsibilities[0, :, 7, j], abs=0.02
    )
    fill = page.value(
        f"document.querySelector('#model-1 [data-token=\"{j}\"]').style.getPropertyValue('--fill')"
    )
    assert len(re.findall(r"rgb\(", fill)) == 2
    page.click(".components tbody tr:nth-child(2) button")
    assert page.value("document.querySelector('.components [aria-pressed=true]').textContent.trim()") == "2"
    through = layer.weights[0, 7] * layer.responsibilities[0, 1, 7]
    assert keys(page)[0][0] == int(through.argmax())
    assert keys(page)[0][1] == pytest.approx(100 * float(through.max()), abs=2)


def test_the_direction_can_be_turned(page, files):
    show(page, files / "one.html", fragment="#2.2.3")
    page.click(".bar-of-controls [aria-label=Direction] button:last-child")
    assert heading(page).endswith("is attended to by")
    assert is_same(keys(page), expected_keys(FOUND, 1, 1, 2, incoming=True))


def test_the_map_shows_the_weights_can_be_zoomed_and_clicked(page, files):
    show(page, files / "one.html", fragment="#1.1.1")
    length = len(FOUND.example.tokens)
    box = page.value(
        "(() => { const m = document.querySelector('.map'); m.scrollIntoView({block: 'center'});"
        " const b = m.getBoundingClientRect(); return [b.left, b.top, panels[0].map.size]; })()"
    )
    left, top, size = box

    def place(i, j):
        start, cell = size["margin"], size["size"] / length
        return left + start + (j + 0.5) * cell, top + start + (i + 0.5) * cell

    page.hover_at(*place(9, 2))
    readout = page.value("document.querySelector('.readout').textContent")
    weight = 100 * float(FOUND.layers[0].weights[0, 9, 2])
    assert readout.startswith("“the” (10) to “of” (3): ")
    assert float(re.search(r": ([\d.]+)%", readout)[1]) == pytest.approx(weight, abs=0.6)
    assert "responsibilities 1: " in readout
    page.click_at(*place(9, 2))
    assert heading(page).startswith("“the”, token 10 of")
    paper = page.value("colours.paper")
    assert pixel(page, 0.9, 0.1) == paper  # a causal model does not see what follows
    assert pixel(page, 0.02, 0.02) != paper
    page.click(".tools button:first-child")
    assert page.value("panels[0].map.view.span") == pytest.approx(0.6 * length)
    page.click(".tools button:last-child")
    assert page.value("panels[0].map.view.span") == length


def test_two_models_side_by_side_move_together(page, files):
    show(page, files / "two.html")
    page.click("#model-2 [data-token='5']")
    for panel, found, layer in ((1, FOUND, 2), (2, OTHER, 1)):
        assert heading(page, panel).startswith("“and”, token 6 of")
        assert is_same(keys(page, panel), expected_keys(found, layer, 0, 5))
    left, right = page.value(
        "[...document.querySelectorAll('.panel')].map(p => p.getBoundingClientRect().left)"
    )
    assert right - left > 500
    assert page.value("getComputedStyle(document.querySelector('.tabs')).display") == "none"


def test_next_tokens_and_labels_are_shown(page, files):
    show(page, files / "one.html", fragment="#1.1.4")
    title = "document.querySelector('.prediction h3').textContent"
    assert page.value(title) == "Next token after “the”"
    rows = page.value("[...document.querySelectorAll('.prediction tr')].map(r => r.cells[1].textContent)")
    values = [100 * value for _, value in FOUND.prediction.candidates[3]]
    assert [float(text.strip("<%")) for text in rows] == pytest.approx(values, abs=0.6)
    text = page.value("document.querySelector('.prediction .about').textContent")
    assert text.startswith("The text goes on with “river”: ")
    show(page, files / "image.html")
    assert page.value(title) == "Prediction"


@pytest.mark.parametrize("name", ["one", "two", "image", "letters"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_both_widths_light_and_dark(page, files, tmp_path, name, width, dark):
    show(page, files / f"{name}.html", width=width, height=844, dark=dark, touch=width == PHONE)
    assert page.value("innerWidth") == width
    wide = """[...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, .tokens")
      && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className)"""
    assert page.value(wide) == []
    assert page.value("document.documentElement.scrollWidth") <= width
    paper = page.value("colours.paper")
    assert (sum(paper) < 380) == dark
    shown = page.value("[...document.querySelectorAll('.panel')].map(p => getComputedStyle(p).display)")
    assert shown.count("none") == (1 if name == "two" and width == PHONE else 0)
    page.screenshot(tmp_path / "page.png")
    assert len((tmp_path / "page.png").read_bytes()) > 20_000
    small = page.value(
        "Math.min(...[...document.querySelectorAll('button, select')].filter(e => e.offsetParent)"
        ".map(e => e.getBoundingClientRect().height))"
    )
    assert small >= 28


def test_a_phone_taps_tokens_and_changes_the_model(page, files):
    show(page, files / "two.html", width=PHONE, height=844, touch=True)
    page.tap("#model-1 [data-token='1']")
    assert heading(page).startswith("“bank”, token 2 of")
    page.tap(".tabs button:last-child")
    shown = page.value("[...document.querySelectorAll('.panel')].map(p => getComputedStyle(p).display)")
    assert shown == ["none", "grid"]
    assert heading(page, 2).startswith("“bank”, token 2 of")
    assert page.value("panels[1].map.canvas.width") > 300


def test_an_image_is_a_grid_of_pixels(page, files):
    show(page, files / "image.html")
    page.click("[data-token='9']")
    assert heading(page).startswith("“35”, token 10 of 64")
    places = page.value(
        "[0, 7, 8].map(n => { const b = document.querySelector(`[data-token='${n}']`).getBoundingClientRect();"
        " return [b.left, b.top]; })"
    )
    assert places[0][1] == places[1][1] < places[2][1]
    assert places[0][0] == places[2][0] < places[1][0]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_an_image_is_seen_whole(page, files, width):
    show(page, files / "cls.html", width=width)
    assert page.value("(e => e.scrollHeight <= e.clientHeight)(document.querySelector('.tokens'))")


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_letters_stand_in_lines_as_in_the_text(page, files, width):
    show(page, files / "letters.html", width=width)
    places = page.value(
        "panels[0].chips.map(chip => { const b = chip.getBoundingClientRect(); return [b.left, b.top]; })"
    )
    starts = [0] + [place + 1 for place, letter in enumerate(CODE) if letter == "\n"]
    assert {places[start][0] for start in starts} == {places[0][0]}
    for start, letter in zip(starts[:2], (CODE.index("\n"), CODE.index("return")), strict=True):
        assert places[start][1] == places[letter][1]
    word = CODE.index("return")
    page.click(f"[data-token='{word}']")
    assert heading(page).startswith(f"“r”, token {word + 1} of")
    place, _ = keys(page)[0]
    shown = page.value("[...document.querySelector('.keys .label').childNodes].map(n => n.textContent)")
    before, letter, after = (
        "".join(LETTERS.example.tokens[a:b])
        for a, b in ((max(0, place - 4), place), (place, place + 1), (place + 1, place + 5))
    )
    assert [part.replace("·", " ").replace("↵", "\n") for part in shown] == [before, letter, after]


def test_a_faulty_page_is_noticed(browser, files, tmp_path):
    broken = (files / "one.html").read_text().replace('"levels":255', '"levels":')
    (tmp_path / "broken.html").write_text(broken)
    browser.look(width=DESKTOP)
    browser.open(tmp_path / "broken.html")
    browser.value("new Promise(done => setTimeout(done, 50))")
    assert any("SyntaxError" in error for error in browser.errors), browser.errors
