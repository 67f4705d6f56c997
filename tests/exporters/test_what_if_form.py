"""The what-if form of the status page: question and answer are one address, without a script."""

import html
import json
import re

import pytest

from online import Snapshot
from tests.support.pages import answer_to
from tests.tracefit.example_snapshot import encoded

ONE = Snapshot.from_json(encoded())


def page_of(target):
    response = answer_to(target, ONE)
    assert response.status == 200
    return response.body.decode()


def section_of(text):
    return text.partition('<section id="what-if"')[2].partition("</section>")[0]


def answer_of(text):
    cells = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section_of(text).partition('id="answer"')[2])
    return {name: html.unescape(value) for name, value in cells}


@pytest.mark.parametrize(
    ("query", "name", "said"),
    [
        ("prompt=2000&output=300&itl=30ms&ttft=&rate=12&ask=plan", "engines", "4 engines are needed for 12 requests/s"),
        ("prompt=2000&output=300&itl=1ms&ask=plan", "fits", "0 requests in flight"),
        ("prompt=2000&output=300&concurrency=20&ask=load", "TTFT", "129 ms"),
        ("requests=64&prefill=&context=57600&ask=step", "takes", "20.5 ms"),
        ("requests=64&context=57600&ask=step", "outside of what was learned from", "requests (1 to 60 seen)"),
        ("requests=125&context=57600&ask=step", "not usable, outside of what was learned from", "requests (1 to 60 "),
    ],
)
def test_a_question_is_answered_on_the_page(query, name, said):
    assert answer_of(page_of(f"/?{query}"))[name].startswith(said)


def test_what_was_asked_stays_in_the_form_and_leads_to_the_same_as_json():
    text = page_of("/?prompt=2000&output=300&itl=30ms&ask=plan")
    assert section_of(text).count('value="2000"') == 1, "only in the form that asked"
    link = html.unescape(re.search(r'href="(/plan[^"]*)"', text)[1])
    assert json.loads(answer_to(link, ONE).body)["concurrency"] == 34


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("ask=plan", "prompt: missing"),
        ("prompt=-1&output=10&itl=30&ask=plan", "prompt: expected 1 to 1e+09"),
        ('requests="><script>&ask=step', "&#34;&gt;&lt;script&gt;"),
        ("requests=1&ask=plan", "no such parameter"),
    ],
)
def test_a_bad_question_is_an_alert_and_the_page_stands(query, said):
    text = page_of(f"/?{query}")
    assert said in section_of(text)
    assert 'role="alert"' in section_of(text)
    assert 'id="config-0f3c5a9b77e1"' in text
