#!/usr/bin/env python3
"""Opens the pages of the site that ./workbook docs built in headless Chromium, and says what is wrong with them.

    docs/check_site.py [--if-chromium] [--screenshots DIR] [PAGE.html ...]

Without pages: the chapters and all other pages made from Markdown, and the indices of the reference. Each is opened as a local file,
light at 1280 pixels and dark at 390, and looked at in both widths. Wrong are: an error on the console, a request that fails, an image
that does not load, a formula that MathJax does not draw, a link to a file or an anchor that does not exist, a page without anything to
read, a page wider than the window (a wide table or listing has to scroll by itself), and a button for light and dark that does not turn
the one into the other. --screenshots saves each page whole as PNG. Needs Python and Chromium (Debian package chromium); with
--if-chromium nothing is checked, and that is no error, where there is none. Exit status: 0 all is well, 1 something is wrong, 2 bad
argument or no Chromium.
"""

import argparse
import base64
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse

SITE = pathlib.Path(__file__).resolve().parent.parent / "build/docs/html"
WIDTHS = (1280, 390)
TALLEST_SCREENSHOT = 16000  # Chromium's textures end at 16384 pixels

# Waits for MathJax, then lists what is wrong with the page.
EXAMINE = r"""
(async () => {
    const wrong = [];
    const text = document.querySelector('div.contents');
    if (!text || !text.innerText.trim()) return ['nothing to read'];
    if (!window.MathJax || !MathJax.Hub || !MathJax.Hub.Queue) return ['MathJax is not loaded'];
    await new Promise(done => MathJax.Hub.Queue(done));
    for (const jax of MathJax.Hub.getAllJax())
        if (jax.texError || !document.getElementById(jax.inputID + '-Frame')?.offsetWidth)
            wrong.push('formula not drawn: ' + jax.originalText);
    const texts = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode;
        if (!node.parentElement.closest('code, pre, script, style, .fragment, .MathJax') && /\$|\\[()[\]]|\\f|\*\*|\]\(/.test(node.data))
            wrong.push('left as text: ' + node.data.trim());
    }
    for (const image of document.images)
        if (!image.complete || !image.naturalWidth) wrong.push('image not loaded: ' + image.src);
    const frame = document.getElementById('doc-content').getBoundingClientRect();
    const scrolls = element => element != text && (getComputedStyle(element).overflowX != 'visible' || scrolls(element.parentElement));
    const wide = [...text.querySelectorAll('*')].find(element => {
        const box = element.getBoundingClientRect();
        return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1) && !scrolls(element.parentElement);
    });
    const button = document.querySelector('doxygen-awesome-dark-mode-toggle');
    if (button?.offsetWidth) {
        const colour = () => getComputedStyle(document.body).backgroundColor, before = colour();
        button.click();
        if (colour() == before) wrong.push('the button for light and dark changes nothing');
        button.click();
        if (colour() != before) wrong.push('the button for light and dark does not change back');
    } else wrong.push('no button for light and dark');
    if (wide) wrong.push('wider than the window: ' + wide.outerHTML.slice(0, 200));
    return wrong;
})()
"""

# Two frames: what listens to the window's size has run, and the page is laid out anew.
AWAIT_LAYOUT = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


class Chromium:
    """A headless Chromium with one tab, spoken to in the DevTools protocol: JSON, ended by zero bytes, on its descriptors 3 and 4."""

    def __init__(self, program, profile):
        read_commands, self.commands = os.pipe()
        self.answers, write_answers = os.pipe()
        # The pages are our own, and containers often refuse the sandbox.
        options = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
                   "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "sh", program, *options],
            pass_fds=(read_commands, write_answers), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_commands)
        os.close(write_answers)
        self.unread = b""
        self.number = 0
        self.events = []
        self.session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(domain + ".enable")

    def receive(self):
        while b"\0" not in self.unread:
            part = os.read(self.answers, 1 << 20)
            if not part:
                sys.exit("Chromium has ended early")
            self.unread += part
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def __call__(self, method, **parameters):
        """Sends a command and returns its result; events that come meanwhile are kept."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self.receive()
            if message.get("id") != self.number:
                self.events.append(message)
            elif "error" in message:
                sys.exit(f"Chromium refuses {method}: {message['error']['message']}")
            else:
                return message["result"]

    def open(self, url):
        self.events.clear()
        self("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def evaluate(self, expression):
        answer = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            return [answer["exceptionDetails"].get("exception", {}).get("description", "exception")]
        return answer["result"]["value"]

    def troubles(self):
        """What the page's console and requests complained of since it was opened."""
        urls = {}
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                urls[parameters["requestId"]] = parameters["request"]["url"]
            elif event["method"] == "Network.loadingFailed" and not parameters.get("canceled"):
                yield f"request failed: {urls.get(parameters['requestId'])}: {parameters['errorText']}"
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                yield f"console: {parameters['entry']['text']} {parameters['entry'].get('url', '')}"
            elif event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                yield "exception: " + details.get("exception", {}).get("description", details["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
                yield "console: " + " ".join(str(argument.get("value")) for argument in parameters["args"])

    def resize(self, width, height):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))


@functools.cache
def anchors(path):
    """What a link to this page may have behind its #."""
    return set(re.findall(r'\b(?:id|name)="([^"]*)"', pathlib.Path(path).read_text("utf-8")))


def examine(chromium, page, scheme, widths, screenshots):
    """What is wrong with a page in this colour scheme. It is opened at the first of the widths, and then made as wide as the others."""
    chromium("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    for n, width in enumerate(widths):
        chromium.resize(width, 900)
        if n == 0:
            chromium.open(page.as_uri())
        else:
            chromium.events.clear()
            chromium.evaluate(AWAIT_LAYOUT)
        wrong = chromium.evaluate(EXAMINE)
        for link in chromium.evaluate("[...document.links].map(link => link.href)") if n == 0 else []:
            url = urllib.parse.urlsplit(link)
            path = urllib.parse.unquote(url.path)
            if url.scheme == "file" and (not os.path.exists(path) or url.fragment and urllib.parse.unquote(url.fragment) not in anchors(path)):
                wrong.append("link to nothing: " + link)
        if screenshots:
            height = chromium.evaluate("document.getElementById('doc-content').scrollHeight + 200")
            chromium.resize(width, min(height, TALLEST_SCREENSHOT))
            chromium.screenshot(screenshots / f"{page.stem}-{width}-{scheme}.png")
        for problem in wrong + list(chromium.troubles()):
            yield f"{page.name}, {width} pixels, {scheme}: {problem}"


def main():
    parser = argparse.ArgumentParser(description="Checks the pages of the site in headless Chromium.")
    parser.add_argument("--if-chromium", action="store_true", help="check nothing where Chromium is missing")
    parser.add_argument("--screenshots", type=pathlib.Path, metavar="DIR", help="folder for a PNG of each page")
    parser.add_argument("pages", nargs="*", metavar="PAGE.html", help="names of pages in build/docs/html")
    arguments = parser.parse_args()
    program = shutil.which("chromium")
    if not program:
        if not arguments.if_chromium:
            parser.error("chromium is not on PATH; on Debian: sudo apt-get install -y chromium")
        print("SKIPPED: chromium is not on PATH, so no page was opened")
        return 0
    names = arguments.pages
    if not names:
        index = SITE / "pages.html"
        chapters = re.findall(r'class="el" href="([^"]+)"', index.read_text()) if index.is_file() else []
        if not chapters:
            parser.error(f"{index} lists no page; build the site with ./workbook docs")
        names = ["index.html", *chapters, "annotated.html", "files.html"]
    pages = [SITE / name for name in names]
    for page in pages:
        if not page.is_file():
            parser.error(f"{page} is not there; build the site with ./workbook docs")
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        chromium = Chromium(program, profile)
        for page in pages:
            for scheme, widths in (("light", WIDTHS), ("dark", WIDTHS[::-1])):
                for problem in examine(chromium, page, scheme, widths, arguments.screenshots):
                    print(problem)
                    failed = 1
        chromium("Browser.close")
        chromium.process.wait()
    print(f"{len(pages)} pages, {' and '.join(map(str, WIDTHS))} pixels wide, light and dark: {'see above' if failed else 'all well'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
