"""Tokens from a file: who gets in, and what a change of the file does."""

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


@pytest.mark.parametrize("header", [f"Bearer {OLD}", f"bearer {OLD}", f"Bearer {NEW}"])
def test_any_token_of_the_file_is_accepted(tmp_path, header):
    assert token_file(tmp_path / "token", f"{OLD}\n\n{NEW}\n").accepts(header)


@pytest.mark.parametrize(
    "header", [f"Bearer {OLD}x", f"Bearer {OLD[:-1]}", f"Basic {OLD}", OLD, "Bearer ", "Bearer \udcff\udc00", "", None]
)
def test_nothing_else_is_accepted_and_tokens_show_in_no_representation(tmp_path, header):
    tokens = token_file(tmp_path / "token", f"{OLD}\n\n{NEW}\n")
    assert not tokens.accepts(header)
    assert OLD not in repr(vars(tokens))


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_a_changed_file_holds_a_second_later_and_leaves_the_former_tokens_in_force_while_it_cannot_be_used(
    tmp_path, text, caplog
):
    clock, path = FakeClock(), tmp_path / "token"
    tokens = token_file(path, OLD, clock)
    rewrite(path, text)
    for _ in range(2):
        clock.advance(1)
        assert tokens.accepts(f"Bearer {OLD}")
        path.unlink(missing_ok=True)
    assert "No such file" in caplog.text
    rewrite(path, NEW)
    assert tokens.accepts(f"Bearer {OLD}"), "not looked at yet"
    clock.advance(1)
    assert tokens.accepts(f"Bearer {NEW}")
    assert not tokens.accepts(f"Bearer {OLD}")


@pytest.mark.parametrize("text", ["", "short"])
def test_a_file_without_a_usable_token_is_a_configuration_error_at_the_start(tmp_path, text):
    with pytest.raises(ConfigError, match="token_file"):
        token_file(tmp_path / "token", text)
    for path in (str(tmp_path / "absent"), "/dev/zero"):
        with pytest.raises(ConfigError, match="token_file"):
            TokenFile(path, "token_file", FakeClock())
