"""The page in a real browser: opened, clicked through, and safe from what chains contain."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import DataError
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.view import write_page, write_selection

selenium = pytest.importorskip("selenium")
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "f"
    good = Chain(
        question="Ann has 16 eggs and eats 7. She sells the rest for $2. How much?",
        steps=("16 - 7 = 9 eggs are left.", "So 9 * 2 = 18 dollars."),
        answer="18",
        reference="18",
    )
    bad = Chain(question=f"Evil {EVIL}", steps=(f"{EVIL} 2 + 2 = 5", "So 5."), answer="5")
    asyncio.run(
        score_chains([good, bad], judge=CalculatorJudge(), perturber=RulePerturber(), out=folder)
    )
    interval = {"estimate": 0.5, "low": 0.4, "high": 0.6, "n": 2, "clusters": 2, "level": 0.95}
    write_selection(
        [{"rule": "majority", "accuracy": interval, "gain": interval, "unknown": 0}], folder
    )
    return write_page(folder)


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser: run `apt-get install -y chromium chromium-driver` and try again")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(driver)
    running = webdriver.Chrome(options=options, service=service)
    running.get(page.as_uri())
    yield running
    running.quit()


def opened(browser: Any, chain: Any, selector: str) -> list[Any]:
    """Elements of a chain once it is open: it is filled by an event after the click."""
    from selenium.webdriver.support.ui import WebDriverWait

    chain.find_element("css selector", "summary").click()
    return WebDriverWait(browser, 30).until(lambda _: chain.find_elements("css selector", selector))


def test_steps_open_and_show_what_was_changed_and_said(browser: Any) -> None:
    assert browser.title == "Faithfulness of f"
    chains = browser.find_elements("css selector", "details.chain")
    assert len(chains) == 2
    steps = opened(browser, chains[0], "button.step")
    assert [s.text for s in steps] == ["1. 16 - 7 = 9 eggs are left.", "2. So 9 * 2 = 18 dollars."]
    steps[1].click()
    panel = chains[0].find_elements("css selector", ".panel")[1]
    assert "right with p = 0.98 (decided) 1 equalities hold, all numbers sourced" in panel.text
    assert "the original was taken" in panel.text
    assert panel.find_elements("css selector", "ins")
    assert steps[1].get_attribute("aria-expanded") == "true"
    steps[1].click()
    assert not panel.is_displayed()


def test_chains_can_be_found_and_the_broken_ones_shown(browser: Any) -> None:
    shown = browser.find_element("id", "shown")
    find = browser.find_element("id", "find")
    find.send_keys("evil")
    assert shown.text == "1 of 2 chains"
    find.send_keys(*["\b"] * 4)
    assert shown.text == "2 of 2 chains"
    browser.find_element("id", "broken").click()
    assert shown.text == "1 of 2 chains"
    chain = browser.find_element("css selector", "details.chain")
    broken = opened(browser, chain, "button.step.breaks")
    assert len(broken) == 1
    assert "2 + 2 = 5" in broken[0].text
    browser.find_element("id", "broken").click()


def test_what_a_chain_contains_stays_text(browser: Any, page: Path) -> None:
    assert browser.title == "Faithfulness of f"
    assert "<script>document.title" not in page.read_text()
    severe = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert severe == []


def test_tables_show_means_and_selection(browser: Any) -> None:
    rows = browser.find_elements("css selector", "#means tbody tr")
    assert len(rows) == 5
    selection = browser.find_element("id", "selection").text
    assert "majority 0.500 0.400 to 0.600" in selection


def test_an_unfinished_run_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="holds no finished run"):
        write_page(tmp_path)
