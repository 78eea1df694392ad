"""Drives a headless Chromium with a separate profile, which remembers what it logged and asked for.

The tests of this folder are skipped where there is no browser; with QUAVER_REQUIRE_BROWSER=1, which continuous
integration sets, they fail there. They last ran with Chromium 150.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REQUIRED = os.environ.get("QUAVER_REQUIRE_BROWSER") == "1"
if not REQUIRED:
    pytest.importorskip("selenium.webdriver", reason="no selenium: pip install quaver[dev]")
from selenium import webdriver  # noqa: E402
from selenium.webdriver import ActionChains, Keys  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.remote.webdriver import WebDriver  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_PATIENCE_S = 20
_POLL_S = 0.02

__all__ = ["Browser", "Keys", "chromium", "hover"]


@contextmanager
def chromium(profile: Path) -> Iterator["Browser"]:
    """Start a browser; the test is skipped, or fails if one is required, where there is none or no driver for it."""
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        missing = "Chromium or Chrome" if program is None else "chromedriver"
        give_up = pytest.fail if REQUIRED else pytest.skip
        give_up(f"no {missing} on PATH; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()


class Browser:
    """What the tests do with a browser.

    Attributes:
        driver: selenium's.
    """

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver
        self._numbers = itertools.count(1)

    def open(self, path: Path, *, width: int = 1280, height: int = 1000, dark: bool = False) -> None:
        """Show a page in a window of `width` x `height` CSS pixels, and wait until it is drawn."""
        self.show(width, height, dark=dark)
        self.driver.get(path.as_uri())
        self.wait(lambda: all(self.map(".plot", "Boolean(element.querySelector('svg'))")))
        self._let_sizes_settle()

    def _let_sizes_settle(self) -> None:
        """Plots are drawn once more when the browser first reports their size, which it does in its next frame."""
        frames = "const [done] = arguments; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.driver.execute_async_script(frames)

    def forget_what_was_logged(self) -> None:
        """The log is in order, but late: wait for a word of our own."""
        word = f"log of {next(self._numbers)}"
        self.driver.get("about:blank")
        self.run("console.log(arguments[0])", word)
        self.wait(lambda: any(word in entry["message"] for entry in self.take_log()))

    def show(self, width: int, height: int = 1000, *, dark: bool = False) -> None:
        """Change the window and its colors."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def all(self, selector: str) -> list:
        """Return the elements that a CSS selector finds."""
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str):
        """Return the first of them, which must be there."""
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """Their texts as they are shown, with single spaces."""
        return [" ".join(text.split()) for text in self.map(selector, "element.innerText")]

    def map(self, selector: str, expression: str) -> list:
        """The values of an expression of JavaScript with `element`, for all elements that a CSS selector finds."""
        return self.run(f"return [...document.querySelectorAll(arguments[0])].map((element) => {expression})", selector)

    def run(self, script: str, *arguments):
        """What the body of a function of JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def pointer(self) -> ActionChains:
        """Return a pointer, and a keyboard, that acts at once: by default each move of a pointer takes 250 ms."""
        return ActionChains(self.driver, duration=0)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, where the focus is."""
        for key in keys:
            self.pointer().send_keys(key).perform()

    def wait(self, condition) -> None:
        """Wait until `condition()` is true, and fail when it does not become so."""
        WebDriverWait(self.driver, _PATIENCE_S, poll_frequency=_POLL_S).until(lambda _: condition())

    def take_log(self) -> list[dict]:
        """What the console said since the last call, of pages before this one too: `forget_what_was_logged` first."""
        return self.driver.get_log("browser")

    def take_requests(self) -> list[str]:
        """Return the addresses that this page asked for since the last call, itself included; see `take_log`."""
        page = self.driver.current_url
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent if params["documentURL"] == page]


def hover(browser, event, plot=".plot"):
    """Rest on an event of a plot of `make_report`, whose last event is 4."""
    element = browser.one(plot)
    browser.run("arguments[0].scrollIntoView({block: 'center'})", element)
    width = element.size["width"]
    x = 62 + (event + 0.4) / 4 * (width - 74)
    browser.pointer().move_to_element_with_offset(element, int(x - width / 2), 0).perform()
