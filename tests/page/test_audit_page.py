"""The page of an audit in a real browser: on a desk and a phone, by day and by night."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from megabatch import Audit
from megabatch.verification.audit_records import LoopRecord, UpdateRecord
from tests.page.browsers import a_browser, needs_chromium, opened
from tests.unit.test_audit import audited, audited_policy

pytestmark = [pytest.mark.slow, needs_chromium]
ACCELERATE = LoopRecord("Accelerate", "", "train.py", 7, "accelerator.backward(loss)")


def long_change() -> Audit:
    """An audit whose change is a name that a phone has no room for."""
    updates = [record for record in audited("means").records if isinstance(record, UpdateRecord)]
    return Audit.from_records(replace(record, loop=ACCELERATE) for record in updates)


AUDITS = {"means": lambda: audited("means"), "policy": lambda: audited_policy(1), "nothing": Audit, "long": long_change}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", AUDITS)
def test_it_fits_and_loads_nothing(browser: Browser, tmp_path: Path, name: str, width: int, scheme: str) -> None:
    path = tmp_path / "audit.html"
    path.write_text(AUDITS[name]().page(), encoding="utf-8")
    with opened(browser, path, width=width, scheme=scheme) as seen:
        page = seen.page
        for folded in page.locator("summary").all():
            folded.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 27)"}[scheme]
        assert seen.problems == []
        assert seen.requests == [seen.address]


def test_a_bar_stands_on_zero_and_reaches_its_weight(browser: Browser, tmp_path: Path) -> None:
    path, found = tmp_path / "audit.html", audited_policy(1)
    path.write_text(found.page(), encoding="utf-8")
    means = [float(weights.mean()) for update in found.updates for weights in update.weights or []]
    with opened(browser, path) as seen:
        edges = seen.page.eval_on_selector_all(
            ".bar i", "bars => bars.map(bar => bar.getBoundingClientRect()).map(box => [box.top, box.bottom])"
        )
        one, zero = (seen.page.locator(place).bounding_box() for place in (".level.one", ".level:not(.one) >> nth=0"))
    assert one is not None
    assert zero is not None
    share = zero["y"] - one["y"]  # pixels from 0 to 1
    for mean, (top, bottom) in zip(means, edges, strict=True):
        base, reached = (bottom, top) if mean > 0 else (top, bottom)
        assert base == pytest.approx(zero["y"], abs=1.5)
        assert (zero["y"] - reached) / share == pytest.approx(mean, abs=0.05)
