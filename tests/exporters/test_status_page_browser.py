"""The status page in a real browser: with scripts, without, and what it draws."""

import os
import re
import subprocess
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from exporters.pages import Response
from tests.conftest import find_tool
from tests.support import exporter_cases as cases
from tests.support.pages import routes_of, serving


class Source:
    """Hands out a newer generation every time it is asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return cases.snapshot(generation=self.asked)


FRAMES = """<!doctype html><title>not loaded</title>
<iframe src="/?config=" width="390" height="900"></iframe>
<iframe src="/?config=" width="900" height="900"></iframe>
<iframe src="/?config=" width="2560" height="900"></iframe><script>
const sideways = (frame) => {
  const page = frame.contentDocument, width = Number(frame.width);
  page.querySelectorAll("details").forEach((box) => { box.open = true; });
  const out = [...page.body.querySelectorAll("*")].filter((each) =>
    !each.closest(".scroll, .sr, .skip") && each.getBoundingClientRect().right > width + 1);
  out.push(...[...page.querySelectorAll(".chart")].filter((each) => each.getBoundingClientRect().width > 432));
  if (width < 640)  // on a phone, what to trust is seen without a swipe
    out.push(...[...page.querySelectorAll(".coefficients td")].filter((each) =>
      each.getBoundingClientRect().right > each.closest(".scroll").getBoundingClientRect().right + 1));
  return `width ${page.documentElement.scrollWidth}, out: ${out.map((each) => each.outerHTML.slice(0, 80))}`;
};
onload = () => { document.title = [...document.querySelectorAll("iframe")].map(sideways).join("; "); };
</script>"""
"""The page at three widths; as title, how wide each became, and what stands out of it beside boxes.

A chart of a fifth more than its 360 pixels stands out, too: its letters grow with it.
"""


ASKING = """<!doctype html><title>not asked</title><iframe src="/"></iframe><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const form = page.querySelector("#what-if form:has([value=step])");
  form.querySelector("[name=requests]").value = "8";
  page.defaultView.stays = true;
  form.querySelector("button").click();
  setTimeout(() => {
    const turned = page.defaultView === null || !page.defaultView.stays;
    document.title = `turned: ${turned}, ${page.querySelector("#answer dd").textContent}`;
  }, 1000);
};
</script>"""


@contextmanager
def shown(source):
    history = cases.learned_history()
    routes = routes_of(source, unix_nano=cases.CREATED_UNIX_NANO, history_of=lambda _: history, version="0.1.0")
    scripted = {
        "/frames": lambda _: Response(HTTPStatus.OK, "text/html", FRAMES.encode()),
        "/asking": lambda _: Response(HTTPStatus.OK, "text/html", ASKING.encode()),
    }
    with serving({**routes, **scripted}) as server:
        yield f"http://127.0.0.1:{server.port}/"


def browse(tmp_path, url, *options):
    chromium = find_tool("chromium")
    command = [
        chromium,
        "--headless",
        "--disable-gpu",
        "--no-first-run",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *options,
        url,
    ]
    environment = {**os.environ, "HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)


def generation_shown(dom):
    return int(re.search(r"generation (\d+)", dom).group(1))


def test_with_javascript_it_follows_the_generations_and_breaks_no_rule_of_its_policy(tmp_path):
    source = Source()
    with shown(source) as url:
        done = browse(tmp_path, url, "--virtual-time-budget=10000", "--dump-dom")
    assert generation_shown(done.stdout) > 1
    assert source.asked >= 3
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []


@pytest.mark.parametrize("source", [cases.snapshot, lambda: cases.full_snapshot(12)], ids=["one", "many"])
def test_nothing_scrolls_sideways_even_with_everything_open(tmp_path, source):
    with shown(source) as url:
        done = browse(tmp_path, f"{url}frames", "--virtual-time-budget=2000", "--dump-dom")
    assert re.search("<title>(.*?)</title>", done.stdout)[1] == "width 390, out: ; width 900, out: ; width 2560, out: "


def test_with_javascript_a_question_is_answered_without_a_turn_of_the_page(tmp_path):
    with shown(cases.snapshot) as url:
        done = browse(tmp_path, f"{url}asking", "--virtual-time-budget=4000", "--dump-dom")
    assert re.search("<title>(.*?)</title>", done.stdout)[1].startswith("turned: false, 0 prefill tokens, 8 requests")
