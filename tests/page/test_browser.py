"""A run's page in a real browser: on a desk and a phone, by day and by night, by hand and by keyboard."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from megabatch.train.cli import front
from megabatch.train.report.data import read_run
from megabatch.train.report.html import write_html
from megabatch.train.runtime.files import read_rows
from tests.page.browsers import a_browser, needs_chromium, opened
from tests.page.made_runs import cut, evaluations, lines, recipe, update, whole_run

pytestmark = [pytest.mark.slow, needs_chromium]

MANY = 10_000
CHARTS = ["loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory_gib", "padding"]
CONTRAST = 4.5  # of small text, by WCAG 2
NAME_OF_FOCUS = "(each => each.getAttribute('aria-label') || each.textContent)(document.activeElement)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of thirty updates on two ranks."""
    return written(whole_run(tmp_path_factory.mktemp("runs") / "run", 30))


def written(*folders: Path, **more: Any) -> Path:
    path = folders[0] / "report.html"
    write_html(path, {"runs": [read_run(folder) for folder in folders], **more})
    return path


def points(page: Page) -> list[int]:
    """The number of points of each chart."""
    return page.eval_on_selector_all(".plot", "each => each.map(plot => plot.dataset.points * 1)")


def bars(page: Page) -> list[float]:
    """The heights of the bars' parts, in pixels."""
    return page.eval_on_selector_all("#cuts rect.real", "each => each.map(bar => bar.getBBox().height)")


def contrast(page: Page, name: str) -> float:
    """The contrast of a color of the page with its ground."""
    script = """name => {
      const style = getComputedStyle(document.documentElement);
      const light = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16) / 255)
        .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
      const [a, b] = [name, "--ground"].map(each => light(style.getPropertyValue(each).trim()) + 0.05);
      return Math.max(a, b) / Math.min(a, b);
    }"""
    return page.evaluate(script, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_whole_at_every_width_by_day_and_by_night(browser: Browser, run: Path, width: int, scheme: str) -> None:
    with opened(browser, run, width=width, scheme=scheme) as seen:
        page = seen.page
        assert page.eval_on_selector_all("figure", "each => each.map(figure => figure.dataset.key)") == CHARTS
        assert points(page) == [30] * len(CHARTS)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("Math.max(...[...document.querySelectorAll('canvas')].map(c => c.offsetWidth))") <= width
        facts = page.locator("#facts")
        for words in ("parameters1,234,567 LlamaForCausalLM", "samples an update64", "learning rate0.002 AdamW"):
            expect(facts).to_contain_text(words)
        expect(facts).to_contain_text("tokens per second and device6,000 median")
        expect(facts).to_contain_text("MFU40% of h100-80g's 989 TFLOP/s in bfloat16")
        memory = page.locator("[data-key=memory_gib] figcaption")
        expect(memory).to_contain_text("predicted peak of an update 1.25measured in update 2 1.2")
        assert len(bars(page)) == 6
        assert page.locator("#timelines svg rect").count() == 18
        assert page.locator("#plans li.chosen").count() == 2
        assert page.locator("#skipped td").first.text_content() == "4"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        for name in ("--ink", "--muted", "--accent", "--warm", "--leaf", "--plum", "--teal", "--rose"):
            assert contrast(page, name) >= CONTRAST, name
        assert (seen.problems, seen.requests) == ([], [seen.address])


def test_another_update_has_other_bars(browser: Browser, run: Path) -> None:
    with opened(browser, run) as seen:
        page, words = seen.page, seen.page.locator("#cuts .words")
        expect(words).to_contain_text("update 30: 24 samples in 3 microbatches on each of 2 data ranks, 1,460 real")
        expect(words).to_contain_text("; the busiest rank computes 1 times the mean")
        last = bars(page)
        page.get_by_role("spinbutton").fill("7")
        page.keyboard.press("Enter")
        expect(words).to_contain_text("update 7:")
        assert bars(page)[0] == pytest.approx(last[0] * 307 / 330, abs=0.01)
        assert bars(page)[1:3] == last[1:3]
        page.get_by_role("button", name="the update after").click()
        expect(words).to_contain_text("update 8:")
        page.get_by_role("slider").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(words).to_contain_text("update 6:")
        page.get_by_role("spinbutton").fill("999")
        page.keyboard.press("Enter")
        expect(words).to_contain_text("update 30:")
        assert bars(page) == last
        page.get_by_text("The bars as a table").click()
        expect(page.locator("#cuts tbody tr").nth(3).locator("td")).to_have_text(["1", "1", "4", "330", "10"])
        page.get_by_role("combobox").select_option("0")
        expect(page.locator("#timelines p").first).to_contain_text("Update 3 took 9 ms on 2 ranks")


def test_padding_and_balance_stand_above_the_curves(browser: Browser, tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", 9)
    rows = [update(step, slowest_over_mean=1 + step / 100, measured_slowest_over_mean=1.5) for step in range(1, 10)]
    (folder / "metrics.jsonl").write_text(lines(rows))
    rank, busy = [[4], [300], [20]], [[4], [400], [80]]
    (folder / "cuts.jsonl").write_text(lines([{"step": 1, "cut": [rank, busy]}]))
    with opened(browser, written(folder)) as seen:
        facts = seen.page.locator("#facts")
        expect(facts).to_contain_text("padding5.0% median")
        expect(facts).to_contain_text("busiest rank over the mean1.05 predicted, 1.5 measured, medians")
        expect(seen.page.locator("#cuts .words")).to_contain_text("13% padding; the busiest rank computes 1.2 times")


def test_the_keyboard_reaches_every_control(browser: Browser, run: Path) -> None:
    with opened(browser, run) as seen:
        page, reached = seen.page, []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(NAME_OF_FOCUS))
            if reached[-1] == "Held out: code":
                break
        plots = [name for name in reached if ", by update. " in name]
        assert len(plots) == len(CHARTS)
        for name in ("Skip to the curves", "the update before", "update, by its number", "the update after",
                     "update, along the run", "bars of the update", "The bars as a table", "recorded update",
                     "The spans as a table", "samples left out", "Updates", "Held out: held-out"):  # fmt: skip
            assert name in reached
        page.locator(".plot").first.focus()
        page.keyboard.press("Home")
        expect(page.locator("#spoken")).to_have_text("update 0: update \u2013, held-out 3, code 4")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#spoken")).to_have_text("update 1: update 5.985, held-out 3, code 4")
        expect(page.locator("figcaption").first).to_contain_text("update 1")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_keyboard_zooms_all_charts_and_back(browser: Browser, run: Path) -> None:
    with opened(browser, run) as seen:
        page = seen.page
        shots = [page.locator(".plot").nth(2).screenshot()]
        page.locator(".plot").first.focus()
        for key in ("+", "Escape"):
            page.keyboard.press(key)
            page.wait_for_timeout(50)
            shots.append(page.locator(".plot").nth(2).screenshot())
        assert shots[0] != shots[1]
        assert shots[0] == shots[2]


def test_everything_has_a_name(browser: Browser, run: Path) -> None:
    with opened(browser, run) as seen:
        tree = seen.page.context.new_cdp_session(seen.page).send("Accessibility.getFullAXTree")["nodes"]
        named = [(each["role"]["value"], each.get("name", {}).get("value", "")) for each in tree if not each["ignored"]]
        of = {role: [name for kind, name in named if kind == role] for role, _ in named}
        kinds = ("button", "slider", "spinbutton", "combobox", "image", "region", "DisclosureTriangle", "heading")
        assert all(of[role] and all(of[role]) for role in kinds), {role: of.get(role) for role in kinds}
        assert len(of["image"]) == len(CHARTS) + 2
        (loss,) = [name for name in of["image"] if name.startswith("loss ")]
        assert loss.startswith("loss per target token (nats), by update. update: 5.985 first, ")
        assert "held-out: 3 first, 3 last, lowest 3, highest 3, updates 0 to 30" in loss


def test_the_numbers_are_a_table_too(browser: Browser, run: Path) -> None:
    with opened(browser, run) as seen:
        seen.page.get_by_text("Updates", exact=True).click()
        expect(seen.page.locator("#numbers tbody tr")).to_have_count(30)
        head = seen.page.locator("#numbers th").all_text_contents()
        assert head[:4] == ["step", "loss", "grad norm", "lr"]
        first = seen.page.locator("#numbers tbody tr").first.locator("td").all_text_contents()
        assert first[:3] == ["1", "5.985", "2"]


def test_ten_thousand_updates_are_shown(browser: Browser, tmp_path: Path) -> None:
    page_of_many = written(whole_run(tmp_path / "run", MANY, ranks=4, microbatches=2))
    with opened(browser, page_of_many, width=390) as seen:
        page = seen.page
        assert points(page) == [MANY] * len(CHARTS)
        assert page.get_by_role("slider").get_attribute("max") == str(MANY - 1)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.get_by_text("Updates", exact=True).click()
        expect(page.locator("#numbers tbody tr").last.locator("td").first).to_have_text("10,000")
        assert page.locator("#numbers tbody tr").count() <= 402
        assert seen.problems == []


def test_what_is_wide_scrolls_by_itself(browser: Browser, tmp_path: Path) -> None:
    """Many bars, long tables and a long name are no wider than a phone."""
    run = whole_run(tmp_path / ("a-name-without-a-space-" * 6), 4, ranks=8, microbatches=24)
    with opened(browser, written(run), width=390) as seen:
        page = seen.page
        wide = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth).length"
        assert page.evaluate(wide) >= 1
        for each in page.locator("summary").all():
            each.click()
        expect(page.locator("#numbers tbody tr").first).to_be_visible()
        assert page.evaluate(wide) >= 2
        assert page.evaluate("document.documentElement.scrollWidth") == 390


IMAGES = [{"step": step, "loss": 1 / step, "lr": 0.1, "samples_per_second": 3.0, "num_samples": 4} for step in (1, 2)]


@pytest.mark.parametrize(
    ("rows", "cuts", "charts", "words"),
    [
        ([], [], ["loss"], "nothing was measured yet"),
        (evaluations(0, "held-out"), [], ["loss"], "held-out 3"),
        ([update(1)], [cut(1, 1, 1)], CHARTS, "update 5.985"),
        ([update(1, loss=None), update(2, loss=None)], [cut(1, 1, 0)], CHARTS, ""),
        (IMAGES, [cut(1, 1), cut(2, 1)], ["loss", "lr", "samples_per_second"], "update 0.5"),
    ],
    ids=["nothing yet", "only an evaluation", "one update", "nothing learned", "images"],
)
def test_any_run_has_a_sensible_page(
    browser: Browser, tmp_path: Path, rows: list[dict[str, Any]], cuts: list[dict[str, Any]], charts: list[str],
    words: str,
) -> None:  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    (tmp_path / "cuts.jsonl").write_text(lines(cuts))
    with opened(browser, written(tmp_path)) as seen:
        page = seen.page
        assert page.eval_on_selector_all("figure", "each => each.map(figure => figure.dataset.key)") == charts
        expect(page.locator("figcaption").first).to_contain_text(words)
        assert page.locator("#cuts").is_visible() == bool(cuts)
        assert page.locator("#cuts rect.padding").count() == (3 if len(cuts) == 1 and rows[0].get("loss") else 0) // 3
        expect(page.locator("#timelines p").first).to_contain_text("Nothing is recorded")
        assert seen.problems == []


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three runs, of which the second was resumed and has two epochs."""
    folder = tmp_path_factory.mktemp("three")
    for number, name in enumerate("abc"):
        run = recipe(whole_run(folder / name, 12), f"[optim]\nlr = {number + 1}e-3\n")
        rows = [row | {"seconds": 10.0 * row["step"] * (number + 1)} for row in read_rows(run / "metrics.jsonl")]
        (run / "metrics.jsonl").write_text(lines(rows))
    to = folder / "comparison.html"
    assert front.run(["report", "--compare", str(folder)]) == 0
    return to


@pytest.mark.parametrize("width", [1280, 390])
def test_runs_are_laid_one_over_the_other(browser: Browser, three: Path, width: int) -> None:
    with opened(browser, three, width=width) as seen:
        page = seen.page
        assert page.locator("h1").text_content() == "a, b, c"
        keys = page.eval_on_selector_all("figure", "each => each.map(figure => figure.dataset.key)")
        assert keys == ["set-held-out-loss", "set-code-loss", *CHARTS]
        expect(page.locator("figcaption").nth(2)).to_contain_text(
            "training" + "".join(f"{name} 4.91" for name in "abc")
        )
        assert page.locator("#comparison tbody tr").nth(1).locator("td").nth(3).text_content() == "0.002"
        assert page.locator("#comparison tr.best td").nth(1).text_content() == "a"
        assert not page.locator("#cuts").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.get_by_role("button", name="training time").click()
        label = page.locator("[data-key=loss] .plot").get_attribute("aria-label") or ""
        assert "by training time. a: 5.985 first" in label
        assert "10 s to 2 min 0 s; b" in label
        assert seen.problems == []


def test_resumes_and_epochs_are_marked_and_time_is_an_axis(browser: Browser, tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", 30)
    rows = [
        row | {"seconds": 10.0 * row["step"], "time": f"2000-01-01T00:{row['step']:02}:00Z"}
        | ({} if "set" in row else {"epoch": row["step"] / 12})
        for row in read_rows(run / "metrics.jsonl")
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text(lines(rows))
    starts = [{"time_utc": f"2000-01-01T00:{minute:02}:30Z"} for minute in (0, 20, 40)]  # the last made no update
    (run / "environment.json").write_text(json.dumps({"starts": starts}))
    with opened(browser, written(run)) as seen:
        page = seen.page
        expect(page.locator("#marks")).to_have_text("Dashed: resumed after update 20; new epochs after update 12, 24.")
        expect(page.locator("#facts")).to_contain_text("training time5 min 0 s")
        expect(page.locator("#status")).to_contain_text("started 1 Jan 2000")
        before = page.locator("[data-key=lr] .plot").screenshot()
        page.get_by_role("button", name="training time").click()
        expect(page.get_by_role("button", name="training time")).to_have_attribute("aria-pressed", "true")
        assert before != page.locator("[data-key=lr] .plot").screenshot()
        page.locator(".plot").first.focus()
        page.keyboard.press("End")
        expect(page.locator("#spoken")).to_contain_text("5 min 0 s: update 3.79")
        page.get_by_role("button", name="updates").click()
        assert before == page.locator("[data-key=lr] .plot").screenshot()
        assert seen.problems == []


def test_a_run_without_times_has_no_axis_of_them(browser: Browser, run: Path) -> None:
    with opened(browser, run) as seen:
        assert not seen.page.locator("#axes").is_visible()
        assert not seen.page.locator("#marks").is_visible()


def test_rewards_of_a_loop_of_its_own_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """As examples/grpo.py writes them."""
    rows = [
        {"step": step, "loss": 0.1, "reward": step / 20, "grad_norm": 1.0, "loss_kl": 0.01} for step in range(1, 21)
    ]
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    with opened(browser, written(tmp_path)) as seen:
        drawn = seen.page.eval_on_selector_all("figure", "each => each.map(figure => figure.dataset.key)")
        assert drawn == ["loss", "reward", "grad_norm", "loss_kl"]
        expect(seen.page.locator("[data-key=reward] figcaption")).to_contain_text("mean reward of rollouts")


def test_names_are_shown_as_they_are(browser: Browser, tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    (tmp_path / "metrics.jsonl").write_text(lines([*evaluations(0, name), update(1)]))
    (tmp_path / "plan.txt").write_text(f"plan  {name}\n")
    with opened(browser, written(tmp_path)) as seen:
        expect(seen.page.locator("figcaption").first).to_contain_text(name)
        assert seen.page.locator("#plans li").text_content() == name
        assert seen.page.locator("img").count() == 0
        assert json.loads(seen.page.locator("#data").text_content() or "")["runs"][0]["plan"] == [name]
        assert (seen.problems, seen.requests) == ([], [seen.address])
