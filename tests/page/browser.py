"""Headless Chromium on the page: what a person does, in the words of the page's labels."""
import time

from selenium import webdriver
from selenium.common.exceptions import (ElementClickInterceptedException,
                                        ElementNotInteractableException,
                                        StaleElementReferenceException)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

PATIENCE_S = 30
VISIBLE = ("return [...document.querySelectorAll(arguments[0])].filter((e) => "
           "e.checkVisibility({opacityProperty: false, visibilityProperty: true}))")


class Browser:
    """One browser with a fresh profile. Sizes in CSS pixels; `phone` also means touch."""

    def __init__(self, url, width=1280, height=900, dark=False, phone=False):
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                         "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone})
        if phone:
            self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        self.system_theme("dark" if dark else "light")
        self.driver.execute_cdp_cmd("Browser.grantPermissions", {
            "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        self.url = url
        self.driver.get(url)
        self.log = []

    def close(self):
        self.driver.quit()

    def system_theme(self, theme):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": theme}]})

    def console(self):
        """What the browser logged so far: policy violations and uncaught errors are among it."""
        self.log += [entry["message"] for entry in self.driver.get_log("browser")]
        return self.log

    def cpu_seconds(self):
        """What the page's main thread has used, whatever else the machine does."""
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition, what):
        end = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < end, f"waited {PATIENCE_S} s for {what}"
            time.sleep(0.02)
        return value

    def all(self, selector):
        """The elements that a person can see."""
        return self.js(VISIBLE, selector)

    def texts(self, selector):
        """Their texts, all of one moment."""
        return self.js(VISIBLE + ".map((e) => e.innerText.trim())", selector)

    def last(self, selector):
        return self.wait(lambda: self.all(selector), selector)[-1]

    def text(self, selector):
        return self.wait(lambda: self.texts(selector), selector)[-1]

    def button(self, label, within="body"):
        """The last button with this label or text, or None."""
        return self.js(f"""return ({VISIBLE.removeprefix("return ")}).filter((e) =>
            (e.getAttribute('aria-label') ?? e.innerText.trim()) === arguments[1]).at(-1)""",
                       f"{within} button", label)

    def click(self, label, within="body"):
        def clicked():
            try:
                button = self.button(label, within)
                return button and button.is_enabled() and (button.click() or True)
            except (StaleElementReferenceException, ElementNotInteractableException,
                    ElementClickInterceptedException):  # it is being built anew, or slides in
                return False
        self.wait(clicked, f"a button {label}")

    def is_answering(self):
        return bool(self.all("#stop"))

    def wait_idle(self):
        self.wait(lambda: not self.is_answering(), "the end of the answer")

    def send(self, text):
        self.last("#question").send_keys(text, Keys.ENTER)
        self.wait(lambda: self.questions()[-1:] == [text], "the question")

    def ask(self, text):
        self.send(text)
        self.wait_idle()
        return self.answers()[-1]

    def questions(self):
        return self.texts(".bubble")

    def answers(self):
        return self.texts(".message.assistant > .prose")

    def press(self, key):
        webdriver.ActionChains(self.driver).send_keys(key).perform()

    def set(self, **fields):
        """Fills fields of the settings by their names and closes the drawer."""
        self.click("Settings")
        for name, value in fields.items():
            field = self.last(f'#settings [name="{name}"]')
            if field.tag_name == "select":
                field.find_element(By.CSS_SELECTOR, f'option[value="{value}"]').click()
            elif isinstance(value, bool):
                if field.is_selected() != value:
                    field.click()
            else:
                field.clear()
                field.send_keys(value)
        self.click("Done", "#settings")
        self.wait(lambda: not self.all("#settings"), "the drawer to close")

    def picture(self, path):
        self.driver.save_screenshot(str(path))
