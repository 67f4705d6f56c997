"""Tokens from a file: who gets in, and what a change of the file does."""

from __future__ import annotations

import pytest

from collector.config.load import ConfigError
from collector.ingest.access import TokenFile
from tests.support.clocks import FakeClock

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def token_file(path, text, clock=None):
    path.write_text(text)
    return TokenFile(str(path), "token_file", clock or FakeClock())


def rewrite(path, text):
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (f"Bearer {OLD}", True),
        (f"bearer {OLD}", True),
        (f"Bearer {NEW}", True),
        (f"Bearer {OLD}x", False),
        (f"Bearer {OLD[:-1]}", False),
        (f"Basic {OLD}", False),
        (OLD, False),
        ("Bearer ", False),
        ("Bearer", False),
        ("Bearer \udcff\udc00", False),
        ("", False),
        (None, False),
    ],
)
def test_any_token_of_the_file_is_accepted_and_nothing_else(tmp_path, header, accepted):
    assert token_file(tmp_path / "token", f"{OLD}\n\n{NEW}\n").accepts(header) is accepted


def test_a_changed_file_holds_a_second_later_at_the_latest(tmp_path):
    clock = FakeClock()
    path = tmp_path / "token"
    tokens = token_file(path, OLD, clock)
    rewrite(path, NEW)
    assert tokens.accepts(f"Bearer {OLD}"), "not looked at yet"
    clock.advance(1)
    assert tokens.accepts(f"Bearer {NEW}")
    assert not tokens.accepts(f"Bearer {OLD}")


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_a_file_that_becomes_unusable_leaves_the_former_tokens_in_force(tmp_path, text):
    clock = FakeClock()
    path = tmp_path / "token"
    tokens = token_file(path, OLD, clock)
    rewrite(path, text)
    clock.advance(1)
    assert tokens.accepts(f"Bearer {OLD}")
    path.unlink()
    clock.advance(1)
    assert tokens.accepts(f"Bearer {OLD}")
    rewrite(path, NEW)
    clock.advance(1)
    assert tokens.accepts(f"Bearer {NEW}")


@pytest.mark.parametrize("text", ["", "short", "\n".join([OLD] * 17)])
def test_a_file_without_a_usable_token_is_a_configuration_error_at_the_start(tmp_path, text):
    with pytest.raises(ConfigError, match="token_file"):
        token_file(tmp_path / "token", text)
    with pytest.raises(ConfigError, match="token_file"):
        TokenFile(str(tmp_path / "absent"), "token_file", FakeClock())


def test_tokens_do_not_show_in_errors_or_representations(tmp_path):
    tokens = token_file(tmp_path / "token", OLD)
    assert OLD not in repr(vars(tokens))
