"""The page at /k3fast in headless Chromium, served with real reports of each state."""

import asyncio
import json
import shutil
import socket
import threading
import time

import pytest
import uvicorn
from fastapi import FastAPI

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, Path, api
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1200,1400",
)
MANY = (Refusal(Reason.STEP_TOO_MANY_TOKENS, "expected at most 64 tokens, found 80"),)
PREFILL = (Refusal(Reason.STEP_PREFILL, "12 prompt tokens"),)
AMBER, GREEN, RED = "rgb(178, 106, 0)", "rgb(29, 127, 78)", "rgb(179, 38, 30)"

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver")


def steps(guard: Guard, fast: int, fallback: int) -> Guard:
    guard.deployment((), {})
    for i in range(fast + fallback + 4):
        guard.open_step(BatchFacts("none", 2, 2, 2, 2, True, ("a", "b")))
        if i < fast:
            guard.close_step(Path.FAST, (), f"decode/t{1 + i % 3}", 2, 2, 2, 0)
        else:
            guard.close_step(Path.STANDARD, PREFILL if i < fast + 4 else MANY, None, 2, 2, 0 if i < fast + 4 else 2, 0)
    return guard


def healthy() -> Guard:
    return steps(Guard(), 400, 0)


def falling_back() -> Guard:
    return steps(Guard(), 300, 60)


def violation() -> Guard:
    guard = steps(Guard(), 400, 0)
    where = {"plan_key": "decode/t2", "layer": 5, "slot": 7, "request": "<img src=x onerror=alert(1)>"}
    guard.violation(Reason.WRITE_OUTSIDE, where, "changed, but the step did not declare it")
    return guard


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """(driver, show): `show(guard)` loads the page with that guard's report and waits until it is drawn."""
    from selenium import webdriver

    guards: list[Guard] = []
    app = FastAPI()
    api.Endpoints().attach_router(app)

    async def gather():
        return [json.dumps(guard.report()) for guard in guards]

    app.state.k3fast_reports = api.ReportCache(gather, ttl=0.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))

    def show(guard: Guard):
        guards[:] = [guard]
        driver.get(f"http://127.0.0.1:{port}/k3fast")
        deadline = time.monotonic() + 20
        while not driver.execute_script("return document.body.dataset.polled"):
            assert time.monotonic() < deadline, "the page never polled"
            time.sleep(0.05)

    yield driver, show
    driver.quit()
    server.should_exit = True
    thread.join(10)


def pixel(image, driver, selector: str) -> tuple[int, int, int]:
    """The colour in the middle of the first match, in a screenshot."""
    box = driver.execute_script(
        "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2, window.devicePixelRatio]",
        selector,
    )
    return image.getpixel((int(box[0] * box[2]), int(box[1] * box[2])))[:3]


@pytest.mark.parametrize(
    ("make", "status", "colour", "words"),
    [
        (healthy, "healthy", GREEN, ["100.0 %", "decode/t3"]),
        (falling_back, "falling back", AMBER, ["step_too_many_tokens", "found 80", "83.3 %"]),
        (violation, "violation", RED, ["write_outside", "layer 5", "slot 7", "decode/t2"]),
    ],
    ids=["healthy", "falling back", "violation"],
)
def test_each_state_is_seen_at_a_glance(page, tmp_path, make, status, colour, words):
    from PIL import Image

    driver, show = page
    show(make())
    head = driver.find_element("id", "head")
    assert driver.find_element("id", "status").text.lower() == status
    assert head.value_of_css_property("border-left-color").replace("rgba", "rgb").startswith(colour[:-1])
    text = driver.find_element("tag name", "main").text
    for word in words:
        assert word in text
    driver.save_screenshot(str(tmp_path / "page.png"))
    with Image.open(tmp_path / "page.png") as image:
        width = image.size[0]
        expected = tuple(int(n) for n in colour[4:-1].split(","))
        box = driver.execute_script("const r = arguments[0].getBoundingClientRect(); return [r.x, r.y + r.height / 2]", head)
        assert image.getpixel((int(box[0]) + 4, int(box[1])))[:3] == expected, "the bar at the left edge carries the state"
        bars = driver.execute_script("return document.querySelectorAll('#chart rect').length")
        assert bars >= 2 and width >= 1000
        drawn = pixel(image, driver, "#chart rect")
        assert drawn == tuple(int(n) for n in GREEN[4:-1].split(",")), "the chart shows fast steps in green"
    assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), "nothing overflows"


def test_what_comes_from_outside_stays_text(page):
    driver, show = page
    show(violation())
    assert not driver.find_elements("css selector", "#violations img")
    assert "<img" in driver.find_element("id", "violations").text


def test_the_page_says_so_when_there_is_no_report(page):
    driver, show = page
    show(healthy())

    class Broken(Guard):
        def report(self):
            raise RuntimeError("engine is dead")

    show(Broken())
    assert driver.find_element("id", "status").text.lower() == "no report"
    assert "engine is dead" in driver.find_element("id", "say").text
